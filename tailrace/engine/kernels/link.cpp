// Slows an exchange down: after each call the rank waits, as if the link between the ranks were slower.

#include <chrono>
#include <cstdint>

namespace {

struct Link {
    void* exchange;
    int (*sum)(void* exchange, float* data, int64_t count);
    int (*gather)(void* exchange, const char* own, char* all, int64_t bytes);
    int64_t size;  // ranks
    double latency_ns, ns_per_byte;

    void wait(int64_t bytes) const {
        const std::chrono::duration<double, std::nano> span(latency_ns + ns_per_byte * static_cast<double>(bytes));
        const auto start = std::chrono::steady_clock::now();
        while (std::chrono::steady_clock::now() - start < span) {
        }
    }
};

}  // namespace

extern "C" {

int link_sum(Link* link, float* data, int64_t count) {
    const int missing = link->sum(link->exchange, data, count);
    link->wait(count * static_cast<int64_t>(sizeof *data));
    return missing;
}

int link_gather(Link* link, const char* own, char* all, int64_t bytes) {
    const int missing = link->gather(link->exchange, own, all, bytes);
    link->wait(bytes * (link->size - 1));
    return missing;
}
}
