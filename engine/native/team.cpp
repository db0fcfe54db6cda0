// The team of team.h: its threads, how they share a job's chunks, and how they wait.
//
// A job is published as one word, the ticket: generation, number of chunks, next chunk. Who swaps it for the same with
// the next chunk counted up has taken a chunk. A thread that wakes late holds an old ticket and takes nothing. The job
// itself is read only by holders of a chunk, and stays valid as long as there is one: the caller waits for them. It
// never waits for a thread that holds none, so a thread that other processes keep from running delays nobody.
//
// A thread without work spins shortly, as the next job of a step is near, and then sleeps until it is woken. Threads
// start with the first job that can use them. They end with the process, or by native_stop.

#include "team.h"

#include <pthread.h>
#include <signal.h>
#include <time.h>

#include <atomic>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int64_t WORKER_SPIN_NS = 50000;  // longer than the pauses between the jobs of a step
constexpr int64_t CALLER_SPIN_NS = 20000;  // the last chunks mostly end sooner; else someone else has the CPU: give ours
constexpr int MAX_WORKERS = 255;

typedef void (*Chunk)(void*, int64_t);
typedef std::atomic<uint32_t> Word;

struct alignas(64) Worker {
    Word asleep{0};
    int index = 0;
    pthread_t thread{};
};

struct Team {
    alignas(64) std::atomic<uint64_t> ticket{0};  // generation << 32 | number of chunks << 16 | next chunk
    alignas(64) Word done{0};                     // chunks of the job that have returned
    Word caller_asleep{0};
    alignas(64) Chunk chunk = nullptr;            // the job: written while no chunk is under way
    void* job = nullptr;
    std::atomic<int> num_helpers{0};              // workers that may take chunks
    std::atomic<bool> stopping{false};
    std::atomic<bool> owned{false};               // by a caller
    int num_workers = 0;
    Worker workers[MAX_WORKERS];
};

Team team;  // nothing destroys it: threads may outlive the end of main

#ifdef __linux__
void wait_while(Word& word, uint32_t value) {
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void wake(Word& word) { syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0); }
#else
pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

void wait_while(Word& word, uint32_t value) {
    pthread_mutex_lock(&mutex);
    if (word.load() == value) pthread_cond_wait(&changed, &mutex);
    pthread_mutex_unlock(&mutex);
}

void wake(Word&) {
    pthread_mutex_lock(&mutex);
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&mutex);
}
#endif

int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

// Spin until ready() or for this long; return whether it was ready.
template <class Ready>
bool spin(int64_t limit_ns, Ready ready) {
    const int64_t end = now_ns() + limit_ns;
    do {
        for (int i = 0; i < 16; i++) {
            if (ready()) return true;
            pause();
        }
    } while (now_ns() < end);
    return false;
}

bool has_chunk(uint64_t ticket) { return (ticket & 0xffff) < (ticket >> 16 & 0xffff); }

// Take chunks and compute them until none is left.
void compute_chunks() {
    uint64_t ticket = team.ticket.load();
    while (has_chunk(ticket)) {
        if (!team.ticket.compare_exchange_weak(ticket, ticket + 1)) continue;
        team.chunk(team.job, ticket & 0xffff);
        const uint32_t num_chunks = ticket >> 16 & 0xffff;
        if (team.done.fetch_add(1) + 1 == num_chunks && team.caller_asleep.load()) wake(team.done);
        ticket = team.ticket.load();
    }
}

bool may_help(const Worker& me) { return has_chunk(team.ticket.load()) && me.index < team.num_helpers.load(); }

void* work(void* self) {
    Worker& me = *(Worker*)self;
    const auto called = [&] { return may_help(me) || team.stopping.load(); };
    while (!team.stopping.load()) {
        if (may_help(me)) {
            compute_chunks();
        } else if (!spin(WORKER_SPIN_NS, called)) {
            me.asleep.store(1);  // before the last look: who calls looks for sleepers after the call
            while (!called() && me.asleep.load()) wait_while(me.asleep, 1);
            me.asleep.store(0);
        }
    }
    return nullptr;
}

void wake_workers(int num) {
    for (int i = 0; i < num; i++)
        if (team.workers[i].asleep.load() && team.workers[i].asleep.exchange(0)) wake(team.workers[i].asleep);
}

// Another process after a fork: the threads stayed behind, in whatever they were doing.
void forget_workers() {
    team.num_workers = 0;
    team.ticket.store(0);
    for (Worker& worker : team.workers) worker.asleep.store(0);
    team.owned.store(false);
}

// Start threads up to this number; fewer if the system has no more.
void start_workers(int num) {
    static bool watches_forks = pthread_atfork(nullptr, nullptr, forget_workers) == 0;
    (void)watches_forks;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // inherited: signals are for the threads of others
    for (; team.num_workers < num; team.num_workers++) {
        Worker& worker = team.workers[team.num_workers];
        worker.index = team.num_workers;
        if (pthread_create(&worker.thread, nullptr, work, &worker)) break;
#ifdef __linux__
        pthread_setname_np(worker.thread, "gptserve-team");
#endif
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace

void run_chunks(Chunk chunk, void* job, int64_t num_chunks, int64_t num_threads) {
    if (num_threads < 2 || num_chunks < 2 || team.owned.exchange(true)) {
        for (int64_t i = 0; i < num_chunks; i++) chunk(job, i);
        return;
    }
    int num_helpers = num_threads - 1 < MAX_WORKERS ? num_threads - 1 : MAX_WORKERS;
    if (num_helpers > num_chunks - 1) num_helpers = num_chunks - 1;
    if (team.num_workers < num_helpers) start_workers(num_helpers);
    team.chunk = chunk;
    team.job = job;
    team.done.store(0);
    team.num_helpers.store(num_helpers);
    team.ticket.store(((team.ticket.load() >> 32) + 1) << 32 | (uint64_t)num_chunks << 16);
    wake_workers(num_helpers < team.num_workers ? num_helpers : team.num_workers);
    compute_chunks();

    const auto all_done = [&] { return team.done.load() == num_chunks; };
    if (!spin(CALLER_SPIN_NS, all_done)) {
        team.caller_asleep.store(1);
        for (uint32_t done; (done = team.done.load()) != num_chunks;) wait_while(team.done, done);
        team.caller_asleep.store(0);
    }
    team.owned.store(false);
}

namespace {

struct Parallel {
    void (*fn)(void*);
    void* data;
};

void call(void* job, int64_t) { ((Parallel*)job)->fn(((Parallel*)job)->data); }

}  // namespace

static thread_local int threads_of_calls = 1;

int num_threads() { return threads_of_calls; }

#define EXPORT extern "C" __attribute__((visibility("default")))

// Set how many threads the products of the calling thread use.
EXPORT void native_set_num_threads(int num) { threads_of_calls = num; }

EXPORT int native_num_threads() { return threads_of_calls; }

// GOMP_parallel on the team: call fn(data) num_threads times, at once where threads are free and else one after the
// other. So fn must take its work from a counter, as a call that comes late finds none.
EXPORT void native_parallel(void (*fn)(void*), void* data, unsigned num_threads, unsigned) {
    Parallel parallel = {fn, data};
    run_chunks(call, &parallel, num_threads < MAX_CHUNKS ? num_threads : MAX_CHUNKS, num_threads);
}

// End all threads of the team; the next job starts them anew. Return false if a job is under way.
EXPORT bool native_stop() {
    if (team.owned.exchange(true)) return false;
    team.stopping.store(true);
    wake_workers(team.num_workers);
    for (int i = 0; i < team.num_workers; i++) pthread_join(team.workers[i].thread, nullptr);
    team.num_workers = 0;
    team.stopping.store(false);
    team.owned.store(false);
    return true;
}
