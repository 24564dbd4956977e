// The division of work between threads, and their barrier.
#pragma once

#include <immintrin.h>
#include <sched.h>

#include <atomic>

// One thread's part [begin, end) of `total` items.
struct Share {
    long begin, end;
    Share(long total, int thread, int threads) : begin(total * thread / threads), end(total * (thread + 1) / threads) {}
};

// Replaces OpenMP's own barrier, which spins for milliseconds. Where threads outnumber free cores, that would keep the
// threads that are waited for from running.
class Barrier {
  public:
    void wait(int threads) {
        if (threads == 1) return;
        const int seen = turn.load(std::memory_order_acquire);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
            arrived.store(0, std::memory_order_relaxed);
            turn.store(seen + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; turn.load(std::memory_order_acquire) == seen; spins++) {
            if (spins < SPINS)
                _mm_pause();
            else
                sched_yield();
        }
    }

  private:
    static constexpr int SPINS = 1000;  // some 20 µs, by which threads that all run may differ
    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<int> turn{0};
};
