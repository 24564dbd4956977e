// Exchanges between processes of one machine through memory that all of them map.
//
// The memory holds a counter for each rank and two slots for each rank. In turn t every rank writes its part into its
// slot t mod 2, sets its counter to t, waits until all counters are at least t, and reads all slots of the turn. One
// wait a turn is enough: a rank that writes slot t mod 2 again, in turn t + 2, has seen all counters at t + 1, so all
// ranks are done reading turn t. Memory that is all zeros is ready for use.
//
// Functions that wait return -1, or the rank that did not come in time; from then on they return that rank at once,
// for the ranks are no longer in the same turn.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>

namespace {

constexpr int64_t kPage = 4096;
constexpr int kSpins = 1000;     // some 20 µs, by which ranks that both run may differ; then let others have the core
constexpr int64_t kTile = 1024;  // elements summed at a time, in the nearest cache

// A counter has its own pair of cache lines, since processors fetch lines in pairs.
struct alignas(128) Counter {
    std::atomic<uint64_t> turn;
};
static_assert(std::atomic<uint64_t>::is_always_lock_free, "a lock would be one process's own");

struct Exchange {
    Counter* counters;
    char* slots;
    int64_t slot_bytes;
    int rank, size;
    std::chrono::duration<double> timeout;
    uint64_t turn = 0;
    int missing = -1;

    // The slot of a rank in the turn that comes next.
    char* slot(int of) const { return slots + (static_cast<int64_t>((turn + 1) % 2) * size + of) * slot_bytes; }
};

int64_t counter_bytes(int size) {
    return (size * static_cast<int64_t>(sizeof(Counter)) + kPage - 1) / kPage * kPage;
}

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

bool wait_for(const Counter& counter, uint64_t turn, std::chrono::duration<double> timeout) {
    for (int spin = 0; spin < kSpins; ++spin) {
        if (counter.turn.load(std::memory_order_acquire) >= turn) return true;
        pause();
    }
    const auto start = std::chrono::steady_clock::now();
    while (counter.turn.load(std::memory_order_acquire) < turn) {
        if (std::chrono::steady_clock::now() - start > timeout) return false;
        std::this_thread::yield();
    }
    return true;
}

// End the writing of this turn and begin its reading.
int meet(Exchange& exchange) {
    const uint64_t turn = ++exchange.turn;
    exchange.counters[exchange.rank].turn.store(turn, std::memory_order_release);
    for (int rank = 0; rank < exchange.size; ++rank)
        if (!wait_for(exchange.counters[rank], turn, exchange.timeout)) return exchange.missing = rank;
    return -1;
}

struct Fp32 {
    using Stored = float;
    static float widen(float value) { return value; }
    static float narrow(float value) { return value; }
};

struct Bf16 {
    using Stored = uint16_t;
    static float widen(uint16_t value) {
        const uint32_t bits = static_cast<uint32_t>(value) << 16;
        float wide;
        std::memcpy(&wide, &bits, sizeof wide);
        return wide;
    }
    static uint16_t narrow(float value) {  // to nearest, ties to even
        uint32_t bits;
        std::memcpy(&bits, &value, sizeof bits);
        const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        return static_cast<uint16_t>(value == value ? rounded : 0x7fc0);
    }
};

// own[i] = the sum over ranks of their element i, in fp32 and in the order of the ranks; `own` is this rank's part.
template <class Format>
void sum_in_order(const Exchange& exchange, const char* slots, typename Format::Stored* own, int64_t count) {
    using Stored = typename Format::Stored;
    float sum[kTile];
    for (int64_t start = 0; start < count; start += kTile) {
        const int64_t length = std::min(kTile, count - start);
        for (int rank = 0; rank < exchange.size; ++rank) {
            const auto* slot = reinterpret_cast<const Stored*>(slots + rank * exchange.slot_bytes);
            const Stored* part = (rank == exchange.rank ? own : slot) + start;
            if (rank == 0)
                for (int64_t i = 0; i < length; ++i) sum[i] = Format::widen(part[i]);
            else
                for (int64_t i = 0; i < length; ++i) sum[i] += Format::widen(part[i]);
        }
        for (int64_t i = 0; i < length; ++i) own[start + i] = Format::narrow(sum[i]);
    }
}

template <class Format>
int all_reduce(Exchange& exchange, typename Format::Stored* data, int64_t count) {
    const int64_t room = exchange.slot_bytes / static_cast<int64_t>(sizeof *data);
    for (int64_t start = 0; start < count && exchange.missing < 0; start += room) {
        const int64_t length = std::min(room, count - start);
        const char* slots = exchange.slot(0);
        std::memcpy(exchange.slot(exchange.rank), data + start, length * sizeof *data);
        if (meet(exchange) < 0) sum_in_order<Format>(exchange, slots, data + start, length);
    }
    return exchange.missing;
}

}  // namespace

extern "C" {

int64_t exchange_bytes(int size, int64_t slot_bytes) { return counter_bytes(size) + 2 * size * slot_bytes; }

// memory: exchange_bytes(size, slot_bytes) bytes, zeros when the first rank opens it; slot_bytes: a multiple of 64.
Exchange* exchange_open(char* memory, int rank, int size, int64_t slot_bytes, double timeout_s) {
    return new Exchange{reinterpret_cast<Counter*>(memory), memory + counter_bytes(size), slot_bytes, rank, size,
                        std::chrono::duration<double>(timeout_s)};
}

void exchange_close(Exchange* exchange) { delete exchange; }

// Wait for all ranks.
int exchange_meet(Exchange* exchange) { return exchange->missing < 0 ? meet(*exchange) : exchange->missing; }

int exchange_sum_fp32(Exchange* exchange, float* data, int64_t count) {
    return all_reduce<Fp32>(*exchange, data, count);
}

int exchange_sum_bf16(Exchange* exchange, uint16_t* data, int64_t count) {
    return all_reduce<Bf16>(*exchange, data, count);
}

// all: the `own` of each rank, `bytes` long, one after the other.
int exchange_gather(Exchange* exchange, const char* own, char* all, int64_t bytes) {
    for (int64_t start = 0; start < bytes && exchange->missing < 0; start += exchange->slot_bytes) {
        const int64_t length = std::min(exchange->slot_bytes, bytes - start);
        const char* slots = exchange->slot(0);
        std::memcpy(exchange->slot(exchange->rank), own + start, length);
        if (meet(*exchange) >= 0) break;
        for (int rank = 0; rank < exchange->size; ++rank) {
            const char* part = rank == exchange->rank ? own + start : slots + rank * exchange->slot_bytes;
            std::memcpy(all + rank * bytes + start, part, length);
        }
    }
    return exchange->missing;
}

}  // extern "C"
