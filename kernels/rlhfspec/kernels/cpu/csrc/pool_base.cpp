#include "pool.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <x86intrin.h>

#include <atomic>
#include <mutex>
#include <thread>

namespace {

constexpr unsigned long long kSpinCycles = 200'000;  // about 0.1 ms: longer than Python takes between two kernels
constexpr int kMaxWorkers = 255;

struct Job {
    RsItems items;
    void (*body)(void*, RsItems&) = nullptr;
    void* context = nullptr;
    int num_workers = 0;
};

struct Pool {
    std::mutex in_use;  // one call at a time; a second caller works alone
    int num_started = 0;
    Job job;
    alignas(64) std::atomic<int> epoch{0};    // grows with every job; workers watch it
    alignas(64) std::atomic<bool> open{false};  // workers may join the job
    alignas(64) std::atomic<int> inside{0};   // workers that have joined it
    alignas(64) std::atomic<int> asleep{0};
};

Pool* pool = new Pool;  // never destroyed: workers outlive static destructors

void sleep_until_not(std::atomic<int>& word, int value) {
    syscall(SYS_futex, reinterpret_cast<int*>(&word), FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void wake_all(std::atomic<int>& word) {
    syscall(SYS_futex, reinterpret_cast<int*>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

// Spins for a moment, then sleeps, until there is a job after `seen`.
int await_job(Pool& p, int seen) {
    unsigned long long began = __rdtsc();
    while (p.epoch.load(std::memory_order_acquire) == seen) {
        if (__rdtsc() - began < kSpinCycles) {
            _mm_pause();
            continue;
        }
        p.asleep.fetch_add(1);
        if (p.epoch.load() == seen) sleep_until_not(p.epoch, seen);
        p.asleep.fetch_sub(1);
    }
    return p.epoch.load(std::memory_order_acquire);
}

void work(Pool* p, int number, int seen) {
    for (;;) {
        seen = await_job(*p, seen);
        // Join first, then look whether the door is still open: the caller closes it and then waits for those inside.
        p->inside.fetch_add(1);
        if (p->open.load() && number < p->job.num_workers) p->job.body(p->job.context, p->job.items);
        p->inside.fetch_sub(1);
    }
}

void forget_workers_after_fork() { pool = new Pool; }  // a child has only the thread that forked

void start_workers(Pool& p, int count) {
    static bool hooked = [] { return pthread_atfork(nullptr, nullptr, forget_workers_after_fork) == 0; }();
    (void)hooked;
    for (; p.num_started < count; ++p.num_started) std::thread(work, &p, p.num_started, p.epoch.load()).detach();
}

}  // namespace

extern "C" void rs_pool_run(long num_items, int num_threads, void (*body)(void*, RsItems&), void* context) {
    Pool& p = *pool;
    int wanted = (int)(num_items < num_threads ? num_items : num_threads) - 1;
    wanted = wanted < kMaxWorkers ? wanted : kMaxWorkers;
    std::unique_lock<std::mutex> lock(p.in_use, std::defer_lock);
    if (wanted < 1 || !lock.try_lock()) {
        RsItems alone;
        alone.num_items = num_items;
        body(context, alone);
        return;
    }
    start_workers(p, wanted);
    p.job.items.next_item = 0;
    p.job.items.num_items = num_items;
    p.job.body = body;
    p.job.context = context;
    p.job.num_workers = wanted;
    p.open.store(true);
    p.epoch.fetch_add(1);
    if (p.asleep.load() > 0) wake_all(p.epoch);
    body(context, p.job.items);
    p.open.store(false);
    for (unsigned long long began = __rdtsc(); p.inside.load() > 0;) {
        if (__rdtsc() - began < kSpinCycles) _mm_pause();
        else sched_yield();  // who is inside may be waiting for this very core
    }
}
