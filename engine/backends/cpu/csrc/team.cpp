// The team of team.h: its threads, how they share a job's chunks, and how they wait.
//
// A job's chunks lie in as many ranges as threads compute it, up to MAX_RANGES. A range is published as one word, its
// ticket: generation, end, next chunk. Who swaps it for the same with the next chunk counted up, or the end counted down,
// has taken a chunk. A thread takes the chunks of its own range in order, as CPUs fetch memory ahead where it is read on
// and on; then it takes the last ones of others. A thread that wakes late holds old tickets and takes nothing. The job
// itself is read only by holders of a chunk, and stays valid as long as there is one: the caller waits for them. It
// never waits for a thread that holds none, so a thread that other processes keep from running delays nobody.
//
// A thread without work spins shortly, as the next job of a step is near, and then sleeps until it is woken. Threads
// start with the first job that can use them. They end with the process, or by native_stop.
//
// Where other processes want the CPUs, too, Linux may let the caller and a worker share one and leave the other to
// another process for good: to it, two threads on one of two CPUs and one on the other are as good as any three. So a
// worker that finds itself on the caller's CPU leaves it. And a worker that has to wait for its CPU in the middle of a
// chunk gets that of the caller, which waits for it. Both then may run where they might before.

#include "team.h"

#include <pthread.h>
#include <sched.h>
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
constexpr int64_t CALLER_SPIN_NS = 100000;  // most chunks end sooner, or their thread does not run
constexpr int64_t STEP_ASIDE_NS = 1000000;  // at most so often
constexpr int MAX_WORKERS = 255, MAX_RANGES = 16;

typedef void (*Chunk)(void*, int64_t);
typedef std::atomic<uint32_t> Word;

struct alignas(64) Worker {
    Word asleep{0};
    Word in_chunk{0};
    Word was_pulled{0};  // to the caller's CPU, which it leaves to the caller
    int index = 0;
    int64_t id = 0;  // the system's
    int64_t stepped_aside_ns = 0;
    pthread_t thread{};
};

struct alignas(64) Range {
    std::atomic<uint64_t> ticket{0};  // generation << 32 | end << 16 | next chunk
};

struct Team {
    Range ranges[MAX_RANGES];
    alignas(64) Word done{0};                     // chunks of the job that have returned
    Word caller_asleep{0};
    alignas(64) Chunk chunk = nullptr;            // the job: written while no chunk is under way
    void* job = nullptr;
    uint32_t num_chunks = 0;
    std::atomic<int> num_ranges{0};
    std::atomic<int> num_helpers{0};              // workers that may take chunks
    std::atomic<int> caller_cpu{-1};
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

#ifdef __linux__
typedef cpu_set_t Cpus;

int64_t thread_id() { return syscall(SYS_gettid); }

int current_cpu() { return sched_getcpu(); }

// Keep a thread on this CPU, or off it, among those where it may run, and say which these are. Return false if that
// leaves none, or the system refuses.
bool restrict_to(int64_t thread, int cpu, bool is_on, Cpus& allowed) {
    if (cpu < 0 || cpu >= CPU_SETSIZE || sched_getaffinity(thread, sizeof allowed, &allowed)) return false;
    Cpus one, cpus;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    CPU_AND(&cpus, &allowed, &one);
    if (!is_on) CPU_XOR(&cpus, &allowed, &cpus);
    return CPU_COUNT(&cpus) > 0 && sched_setaffinity(thread, sizeof cpus, &cpus) == 0;
}

void allow(int64_t thread, const Cpus& cpus) { sched_setaffinity(thread, sizeof cpus, &cpus); }
#else
struct Cpus {};

int64_t thread_id() { return 0; }

int current_cpu() { return -1; }

bool restrict_to(int64_t, int, bool, Cpus&) { return false; }

void allow(int64_t, const Cpus&) {}
#endif

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

// Take a chunk, the next one of range `own` or the last one of another. Return -1 if there is none.
int64_t take_chunk(int own) {
    const int num_ranges = team.num_ranges.load();
    for (int i = 0; i < num_ranges; i++) {
        std::atomic<uint64_t>& range = team.ranges[(own + i) % num_ranges].ticket;
        uint64_t ticket = range.load();
        while (has_chunk(ticket)) {
            if (i == 0 && range.compare_exchange_weak(ticket, ticket + 1)) return ticket & 0xffff;
            if (i > 0 && range.compare_exchange_weak(ticket, ticket - 0x10000)) return (ticket >> 16 & 0xffff) - 1;
        }
    }
    return -1;
}

// Take chunks and compute them until none is left. `in_chunk` is 1 during each.
void compute_chunks(int own, Word& in_chunk) {
    for (int64_t i; (i = take_chunk(own)) >= 0;) {
        in_chunk.store(1, std::memory_order_relaxed);
        team.chunk(team.job, i);
        in_chunk.store(0, std::memory_order_relaxed);
        const uint32_t num_chunks = team.num_chunks;
        if (team.done.fetch_add(1) + 1 == num_chunks && team.caller_asleep.load()) wake(team.done);
    }
}

bool may_help(const Worker& me) {
    if (me.index >= team.num_helpers.load()) return false;
    for (int i = 0; i < team.num_ranges.load(); i++)
        if (has_chunk(team.ranges[i].ticket.load())) return true;
    return false;
}

// Leave the caller's CPU, if this is it and there are others.
void step_aside(Worker& me) {
    const int cpu = team.caller_cpu.load();
    if (cpu < 0 || cpu != current_cpu()) return;
    const int64_t now = now_ns();
    if (now - me.stepped_aside_ns < STEP_ASIDE_NS) return;
    me.stepped_aside_ns = now;
    Cpus allowed;
    if (restrict_to(me.id, cpu, false, allowed)) allow(me.id, allowed);
}

void* work(void* self) {
    Worker& me = *(Worker*)self;
    me.id = thread_id();
    const auto called = [&] { return may_help(me) || team.stopping.load(); };
    while (!team.stopping.load()) {
        if (may_help(me)) {
            step_aside(me);
            compute_chunks(me.index + 1, me.in_chunk);
        } else if (me.was_pulled.exchange(0) || !spin(WORKER_SPIN_NS, called)) {
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
    for (Range& range : team.ranges) range.ticket.store(0);
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

// Give this CPU to a worker that is in a chunk, and sleep until all chunks are done.
void sleep_until_done(int64_t num_chunks, int num_helpers) {
    Cpus allowed;
    Worker* pulled = nullptr;
    team.caller_asleep.store(1);
    for (int i = 0; i < num_helpers && !pulled; i++) {
        Worker& worker = team.workers[i];
        if (!worker.in_chunk.load()) continue;
        worker.was_pulled.store(1);
        if (restrict_to(worker.id, current_cpu(), true, allowed)) pulled = &worker;
    }
    for (uint32_t done; (done = team.done.load()) != num_chunks;) wait_while(team.done, done);
    team.caller_asleep.store(0);
    if (pulled) allow(pulled->id, allowed);
}

}  // namespace

void run_chunks(Chunk chunk, void* job, int64_t num_chunks, int64_t num_threads) {
    if (num_chunks > MAX_CHUNKS) __builtin_trap();  // the ticket has no room for them: the call would never return
    if (num_threads < 2 || num_chunks < 2 || team.owned.exchange(true)) {
        for (int64_t i = 0; i < num_chunks; i++) chunk(job, i);
        return;
    }
    int num_helpers = num_threads - 1 < MAX_WORKERS ? num_threads - 1 : MAX_WORKERS;
    if (num_helpers > num_chunks - 1) num_helpers = num_chunks - 1;
    if (team.num_workers < num_helpers) start_workers(num_helpers);
    team.chunk = chunk;
    team.job = job;
    team.caller_cpu.store(current_cpu());
    team.done.store(0);
    team.num_chunks = num_chunks;
    team.num_helpers.store(num_helpers);
    const int num_ranges = num_helpers + 1 < MAX_RANGES ? num_helpers + 1 : MAX_RANGES;
    team.num_ranges.store(num_ranges);
    for (int64_t i = 0; i < num_ranges; i++) {
        std::atomic<uint64_t>& range = team.ranges[i].ticket;
        const uint64_t next = i * num_chunks / num_ranges, end = (i + 1) * num_chunks / num_ranges;
        range.store(((range.load() >> 32) + 1) << 32 | end << 16 | next);
    }
    wake_workers(num_helpers < team.num_workers ? num_helpers : team.num_workers);
    Word in_chunk{0};
    compute_chunks(0, in_chunk);
    if (!spin(CALLER_SPIN_NS, [&] { return team.done.load() == num_chunks; })) sleep_until_done(num_chunks, num_helpers);
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

// Set how many threads the products of the calling thread use.
EXPORT void native_set_num_threads(int num) { threads_of_calls = num; }

EXPORT int native_num_threads() { return threads_of_calls; }

// Call fn(data) num_threads times in the team, at once where threads are free and else one after the other. So fn must
// take its work from a counter, as a call that comes late finds none.
EXPORT void native_parallel(void (*fn)(void*), void* data, unsigned num_threads) {
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
