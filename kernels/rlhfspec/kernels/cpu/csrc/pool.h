// A pool of threads that never waits for a thread that has not begun.
//
// An OpenMP region ends when every thread has come by; on a shared machine one of them may not get a core for
// milliseconds, while there is nothing left to do. Here the caller works through the items itself, workers take
// items while they are awake, and the call ends when every *begun* item is done. Which thread does which item is open, so a
// body may depend on the item's number alone.
#pragma once

// Shared by files compiled for different instruction sets, so: no std:: templates, everything inlined (see simd.h).
struct RsItems {
    long next_item = 0;
    long num_items = 0;

    // The next item's number, or -1 when all are taken.
    inline __attribute__((always_inline)) long take() {
        long item = __atomic_fetch_add(&next_item, 1, __ATOMIC_RELAXED);
        return item < num_items ? item : -1;
    }
};

// Runs `body(context, items)` on the caller and on at most `num_threads - 1` workers, each taking items until none is left.
extern "C" void rs_pool_run(long num_items, int num_threads, void (*body)(void*, RsItems&), void* context);

// body(items) for what has to be set up once per thread: `while ((item = items.take()) >= 0) ...`
template <typename Body>
static inline void rs_parallel(long num_items, int num_threads, Body&& body) {
    auto call = [](void* context, RsItems& items) { (*static_cast<Body*>(context))(items); };
    rs_pool_run(num_items, num_threads, call, &body);
}

// body(item) for every item.
template <typename Body>
static inline void rs_parallel_for(long num_items, int num_threads, Body&& body) {
    rs_parallel(num_items, num_threads, [&](RsItems& items) {
        for (long item; (item = items.take()) >= 0;) body(item);
    });
}
