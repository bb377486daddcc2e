// A stand-in for libnccl, and for the streams of GPUs, whose ranks are threads of one
// process and whose device memory is host memory.
//
// A stream is a thread that does one thing after the other, so that operations meet as
// they do on GPUs: when every rank's stream has come to them. Calls do not wait: what a
// group has begun is on its stream only when the communicator has been asked for its state
// a second time.
//
// What NCCL would refuse, or what would be undefined, is a line of `fake_log` that begins
// with ILLEGAL. Ranks that call different things hang, as with NCCL, until they abort.
#define _GNU_SOURCE
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MOST 16
#define CALLS 256

static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t moved = PTHREAD_COND_INITIALIZER;
static char text[1 << 16];
static __thread int device_of_thread = -1;

static void lock(void) { pthread_mutex_lock(&turn); }
static void unlock(void) { pthread_mutex_unlock(&turn); }
static void wait_a_bit(void) { pthread_cond_wait(&moved, &turn); }
static void wake(void) { pthread_cond_broadcast(&moved); }
static void say(const char *format, ...) {
  size_t length = strlen(text);
  va_list args;
  va_start(args, format);
  vsnprintf(text + length, sizeof text - length - 1, format, args);
  va_end(args);
  strncat(text, "\n", sizeof text - strlen(text) - 1);
}

// What a test asks for.
static long version = 22803, refuse_init, late_rank = -1, late_ms, hang_rank = -1, hang_at, fail_rank = -1, fail_at;
static long stuck_abort_ms, stuck_call_rank = -1;
void fake_set(const char *name, long value) {
  static const struct { const char *name; long *value; } known[] = {
      {"version", &version}, {"refuse_init", &refuse_init}, {"late_rank", &late_rank}, {"late_ms", &late_ms},
      {"hang_rank", &hang_rank}, {"hang_at", &hang_at}, {"fail_rank", &fail_rank}, {"fail_at", &fail_at},
      {"stuck_abort_ms", &stuck_abort_ms}, {"stuck_call_rank", &stuck_call_rank}};
  lock();
  for (size_t i = 0; i < sizeof known / sizeof *known; i++)
    if (!strcmp(known[i].name, name)) *known[i].value = value;
  unlock();
}

// Streams.
typedef void (*Run)(void *);
typedef struct Task { struct Task *next; Run run; void *arg; } Task;
typedef struct { Task *first, *last; } Tasks;
typedef struct { int device, capturing; long queued, done; Tasks tasks, graph; } Stream;
static void append(Tasks *list, Run run, void *arg) {
  Task *task = calloc(1, sizeof *task);
  task->run = run, task->arg = arg;
  if (list->last) list->last->next = task;
  else list->first = task;
  list->last = task;
}
static void push(Stream *stream, Run run, void *arg) {
  if (stream->capturing) {
    append(&stream->graph, run, arg);
    return;
  }
  append(&stream->tasks, run, arg);
  stream->queued++;
  wake();
}
static void *work(void *argument) {
  Stream *stream = argument;
  for (lock();;) {
    Task *task = stream->tasks.first;
    if (!task) {
      wait_a_bit();
      continue;
    }
    unlock();
    task->run(task->arg);
    lock();
    stream->tasks.first = task->next;
    if (!task->next) stream->tasks.last = 0;
    stream->done++;
    wake();
  }
  return 0;
}
void fake_bind(int device) { device_of_thread = device; }
Stream *fake_stream(int device) {
  Stream *stream = calloc(1, sizeof *stream);
  pthread_t thread;
  stream->device = device;
  pthread_create(&thread, 0, work, stream);
  pthread_detach(thread);
  return stream;
}
void fake_push(Stream *stream, Run run, void *arg) {
  lock();
  push(stream, run, arg);
  unlock();
}
long fake_position(Stream *stream) {
  lock();
  if (stream->capturing) say("ILLEGAL event outside of a graph while it is captured");
  long position = stream->queued;
  unlock();
  return position;
}
int fake_passed(Stream *stream, long position) {
  lock();
  int passed = stream->done >= position;
  unlock();
  return passed;
}
void fake_wait(Stream *stream, long position) {
  lock();
  while (stream->done < position) wait_a_bit();
  unlock();
}
void fake_capture(Stream *stream) {
  lock();
  stream->capturing = 1, stream->graph = (Tasks){0, 0};
  unlock();
}
Task *fake_graph(Stream *stream) {
  lock();
  stream->capturing = 0;
  Task *graph = stream->graph.first;
  unlock();
  return graph;
}
void fake_launch(Task *graph, Stream *stream) {
  lock();
  for (; graph; graph = graph->next) push(stream, graph->run, graph->arg);
  unlock();
}

// What a test wants to go on side by side: an exchange, and a kernel behind the one before it.
#define DEVICES 64
static struct { long begun, ended, meets; int running, kernel; } side[DEVICES];
static int in_vain(void) {
  struct timespec until;
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_sec += 20;
  return pthread_cond_timedwait(&moved, &turn, &until);
}
void fake_meet(int device, long exchange) {
  lock();
  side[device].meets = side[device].begun + exchange, side[device].kernel = 0;
  unlock();
}
void fake_kernel(int device) {
  lock();
  long meets = side[device].meets;
  if (meets && side[device].ended == meets) {
    side[device].kernel = 1;
    wake();
    while (side[device].ended == meets)
      if (in_vain()) {
        say("ILLEGAL kernel of device %d that no exchange goes on beside", device);
        break;
      }
  }
  unlock();
}
static void begin_batch(int device) {
  if (side[device].running++) say("ILLEGAL operations of two streams of device %d at once", device);
  long meets = side[device].meets;
  if (side[device].begun++ != meets || !meets) return;
  while (!side[device].kernel)
    if (in_vain()) {
      say("ILLEGAL exchange of device %d that no kernel goes on beside", device);
      break;
    }
}
static void end_batch(int device) {
  side[device].running--;
  side[device].ended++;
}

// The library.
enum { SUCCESS = 0, INTERNAL = 3, ARGUMENT = 4, USAGE = 5, REMOTE = 6, IN_PROGRESS = 7 };
enum { SEND, RECEIVE, ALL_GATHER, BROADCAST, ALL_REDUCE, REDUCE_SCATTER, ALL_TO_ALL };
typedef struct { char bytes[128]; } Id;
typedef struct {
  size_t size;
  unsigned magic, version;
  int blocking, numbers[3];
  const char *network;
  int split_share, traffic_class;
} Config;
typedef struct { int kind, type, op, root; uintptr_t from, to; size_t count; } Call;
typedef struct Meeting { struct Meeting *next; long number; int arrived, left; Call calls[MOST]; } Meeting;
typedef struct Mail { struct Mail *next; int from, to, taken; uintptr_t at; size_t bytes; } Mail;
typedef struct Comm Comm;
typedef struct Clique {
  struct Clique *next;
  Id id;
  int ranks, arrived, finalized, broken;
  Comm *comms[MOST];
  Meeting *meetings;
  Mail *mails, *last_mail;
  int splitting, colors[MOST], keys[MOST];
  Comm **places[MOST];
} Clique;
typedef struct { Comm *comm; Stream *stream; int count; Call calls[CALLS]; } Batch;
struct Comm {
  Clique *clique;
  int rank, device, live, aborted, busy, failed, finalizing, splitting, polls;
  long batches, meetings;
  Batch *begun;
};
static Clique *cliques;
static int live_comms;
static __thread int depth;
static __thread Batch *group;

char *fake_log(void) {
  lock();
  char *copy = strdup(text);
  unlock();
  return copy;
}
int fake_live(void) { return live_comms; }
static int is_live(Comm *comm, const char *function) {
  if (comm && comm->live) return 1;
  say("ILLEGAL %s of a communicator that is not live", function);
  return 0;
}

int ncclGetVersion(int *value) { *value = version; return SUCCESS; }
const char *ncclGetErrorString(int code) { return code == REMOTE ? "a remote error" : code == IN_PROGRESS ? "in progress" : "an error"; }
const char *ncclGetLastError(Comm *comm) { return comm && comm->failed ? "the last words" : ""; }
int ncclGetUniqueId(Id *id) {
  static int count;
  lock();
  memset(id, 0, sizeof *id);
  snprintf(id->bytes, sizeof id->bytes, "fake id %d", ++count);
  unlock();
  return SUCCESS;
}
static Comm *make(Clique *clique, int rank, int device) {
  Comm *comm = calloc(1, sizeof *comm);
  comm->clique = clique, comm->rank = rank, comm->device = device, comm->live = 1;
  clique->comms[rank] = comm;
  live_comms++;
  return comm;
}
int ncclCommInitRankConfig(Comm **place, int ranks, Id id, int rank, const Config *config) {
  if (refuse_init) return INTERNAL;
  lock();
  if (device_of_thread < 0) say("ILLEGAL init on a thread without a device");
  if (config->magic != 0xcafebeef || config->size < 48 || config->version < 21800) say("ILLEGAL configuration");
  if (config->blocking != 0) say("ILLEGAL blocking communicator");
  for (int i = 0; i < 3; i++)
    if (config->numbers[i] != INT_MIN) say("ILLEGAL number in a configuration");
  if (config->split_share != INT_MIN || config->traffic_class != INT_MIN || config->network) say("ILLEGAL configuration");
  if (rank < 0 || rank >= ranks || strncmp(id.bytes, "fake id", 7)) say("ILLEGAL rank %d of %d or id", rank, ranks);
  Clique *clique = cliques;
  while (clique && memcmp(&clique->id, &id, sizeof id)) clique = clique->next;
  if (!clique) {
    clique = calloc(1, sizeof *clique);
    clique->id = id, clique->ranks = ranks, clique->next = cliques, cliques = clique;
  }
  if (clique->ranks != ranks || clique->comms[rank]) say("ILLEGAL second rank %d", rank);
  *place = make(clique, rank, device_of_thread);
  clique->arrived++;
  wake();
  unlock();
  return IN_PROGRESS;
}

static void split_all(Clique *clique) {
  for (int i = 0; i < clique->ranks; i++) {
    int color = clique->colors[i], ranks = 0, rank = 0;
    clique->comms[i]->splitting = 0;
    if (color < 0) continue;
    for (int j = 0; j < clique->ranks; j++) {
      if (clique->colors[j] != color) continue;
      ranks++;
      rank += clique->keys[j] < clique->keys[i] || (clique->keys[j] == clique->keys[i] && j < i);
    }
    Clique *part = cliques;
    Id id = {0};
    snprintf(id.bytes, sizeof id.bytes, "part %p of %d, %ld", (void *)clique, color, clique->comms[0]->batches);
    while (part && memcmp(&part->id, &id, sizeof id)) part = part->next;
    if (!part || part->arrived == part->ranks) {
      part = calloc(1, sizeof *part);
      part->id = id, part->ranks = ranks, part->next = cliques, cliques = part;
    }
    part->arrived++;
    *clique->places[i] = make(part, rank, clique->comms[i]->device);
  }
  clique->splitting = 0;
}
int ncclCommSplit(Comm *comm, int color, int key, Comm **place, const Config *config) {
  lock();
  int live = is_live(comm, "split");
  if (live) {
    Clique *clique = comm->clique;
    if (comm->begun || comm->splitting) say("ILLEGAL split of a communicator that is busy");
    if (color < -1) say("ILLEGAL colour %d", color);
    if (config) say("ILLEGAL configuration of a split");
    clique->colors[comm->rank] = color, clique->keys[comm->rank] = key, clique->places[comm->rank] = place;
    comm->splitting = 1;
    if (++clique->splitting == clique->ranks) split_all(clique);
  }
  unlock();
  return live ? IN_PROGRESS : ARGUMENT;
}
static void run(void *);
int ncclCommGetAsyncError(Comm *comm, int *code) {
  lock();
  *code = ARGUMENT;
  if (is_live(comm, "state")) {
    if (comm->begun && --comm->polls <= 0) {
      push(comm->begun->stream, run, comm->begun);
      comm->begun = 0;
    }
    Clique *clique = comm->clique;
    int ends = comm->finalizing && clique->finalized < clique->ranks;
    *code = comm->failed ? comm->failed : comm->begun || comm->splitting || ends || clique->arrived < clique->ranks ? IN_PROGRESS : SUCCESS;
  }
  unlock();
  return SUCCESS;
}
int ncclCommCount(Comm *comm, int *count) { *count = comm->clique->ranks; return SUCCESS; }
int ncclCommUserRank(Comm *comm, int *rank) { *rank = comm->rank; return SUCCESS; }
int ncclCommFinalize(Comm *comm) {
  lock();
  if (is_live(comm, "finalize")) comm->finalizing = 1, comm->clique->finalized++;
  unlock();
  return IN_PROGRESS;
}
static void end(Comm *comm) {
  while (comm->busy) wait_a_bit();
  comm->live = 0;
  live_comms--;
}
int ncclCommDestroy(Comm *comm) {
  lock();
  if (is_live(comm, "destroy")) {
    if (comm->busy || comm->begun || !comm->finalizing) say("ILLEGAL destroy of a communicator that is not at rest");
    end(comm);
  }
  unlock();
  return SUCCESS;
}
int ncclCommAbort(Comm *comm) {
  usleep(stuck_abort_ms * 1000);
  lock();
  if (is_live(comm, "abort")) {
    comm->aborted = comm->clique->broken = 1;
    for (Mail *mail = comm->clique->mails; mail; mail = mail->next)
      if (mail->from == comm->rank) mail->taken = 1;
    wake();
    end(comm);
    say("abort of rank %d", comm->rank);
  }
  unlock();
  return SUCCESS;
}

static size_t size_of(int type) { return type < 2 ? 1 : type == 6 || type == 9 ? 2 : type == 4 || type == 5 || type == 8 ? 8 : 4; }
#define JOIN(Type)                                                                    \
  for (size_t i = 0; i < count; i++) {                                                \
    Type *a = (Type *)to + i, b = ((Type *)from)[i];                                  \
    *a = op == 0 ? (Type)(*a + b) : op == 2 ? (*a > b ? *a : b) : (*a < b ? *a : b);  \
  }
static void join(int type, int op, char *to, const char *from, size_t count) {
  switch (type) {
    case 1: JOIN(uint8_t) break;
    case 2: JOIN(int32_t) break;
    case 4: JOIN(int64_t) break;
    case 7: JOIN(float) break;
    default: say("ILLEGAL type %d of a reduction", type);
  }
}
// In an order that is not that of ranks: the last one first.
static void reduce(const Meeting *meeting, int ranks, const Call *call, size_t skip, size_t count, char *to) {
  size_t size = size_of(call->type);
  memcpy(to, (char *)meeting->calls[ranks - 1].from + skip * size, count * size);
  for (int i = ranks - 2; i >= 0; i--) join(call->type, call->op, to, (char *)meeting->calls[i].from + skip * size, count);
}
// What a rank gets; returns its bytes.
static size_t result(const Meeting *meeting, int rank, int ranks, char **out) {
  const Call *own = &meeting->calls[rank];
  size_t part = own->count * size_of(own->type);
  char *to = *out = malloc(part * ranks + 1);
  switch (own->kind) {
    case ALL_REDUCE: reduce(meeting, ranks, own, 0, own->count, to); return part;
    case REDUCE_SCATTER: reduce(meeting, ranks, own, rank * own->count, own->count, to); return part;
    case BROADCAST: memcpy(to, (char *)meeting->calls[own->root].from, part); return part;
  }
  for (int i = 0; i < ranks; i++)
    memcpy(to + i * part, (char *)meeting->calls[i].from + (own->kind == ALL_TO_ALL ? rank * part : 0), part);
  return part * ranks;
}
static int differ(const Call *a, const Call *b) {
  return a->kind != b->kind || a->count != b->count || a->type != b->type || a->op != b->op || a->root != b->root;
}
static void hang(Comm *comm) {
  while (!comm->aborted) wait_a_bit();
}
static void meet(Comm *comm, const Call *call) {
  Clique *clique = comm->clique;
  long number = comm->meetings++;
  Meeting *meeting = clique->meetings;
  while (meeting && meeting->number != number) meeting = meeting->next;
  if (!meeting) {
    meeting = calloc(1, sizeof *meeting);
    meeting->number = number, meeting->next = clique->meetings, clique->meetings = meeting;
  }
  meeting->calls[comm->rank] = *call;
  meeting->arrived++;
  wake();
  while (meeting->arrived < clique->ranks && !comm->aborted) wait_a_bit();
  int differs = 0;
  for (int i = 0; i < clique->ranks && !comm->aborted; i++) differs |= differ(call, &meeting->calls[i]);
  // The others' memory is there only until they abort.
  if (differs || clique->broken) hang(comm);
  if (comm->aborted) return;
  char *bytes;
  size_t count = result(meeting, comm->rank, clique->ranks, &bytes);
  meeting->left++;
  wake();
  while (meeting->left < clique->ranks && !comm->aborted) wait_a_bit();
  if (!comm->aborted) memcpy((char *)call->to, bytes, count);
  free(bytes);
}
static void post(Comm *comm, const Call *call) {
  Clique *clique = comm->clique;
  Mail *mail = calloc(1, sizeof *mail);
  mail->from = comm->rank, mail->to = call->root, mail->at = call->from, mail->bytes = call->count * size_of(call->type);
  if (clique->last_mail) clique->last_mail->next = mail;
  else clique->mails = mail;
  clique->last_mail = mail;
  wake();
}
static int receive(Comm *comm, const Call *call) {
  for (Mail *mail = comm->clique->mails; mail; mail = mail->next) {
    if (mail->taken || mail->from != call->root || mail->to != comm->rank) continue;
    if (mail->bytes != call->count * size_of(call->type)) hang(comm);
    if (comm->aborted) return 0;
    memcpy((char *)call->to, (char *)mail->at, mail->bytes);
    mail->taken = 1;
    wake();
    return 1;
  }
  return 0;
}
static int mine_left(Comm *comm) {
  for (Mail *mail = comm->clique->mails; mail; mail = mail->next)
    if (mail->from == comm->rank && !mail->taken) return 1;
  return 0;
}
static void messages(Comm *comm, const Batch *batch) {
  char got[CALLS] = {0};
  for (int i = 0; i < batch->count; i++)
    if (batch->calls[i].kind == SEND) post(comm, &batch->calls[i]);
  for (;;) {
    int left = 0, progress = 0;
    for (int i = 0; i < batch->count && !comm->aborted; i++) {
      const Call *call = &batch->calls[i];
      if (call->kind != RECEIVE || got[i]) continue;
      int earlier = 0;
      for (int j = 0; j < i; j++) earlier |= batch->calls[j].kind == RECEIVE && !got[j] && batch->calls[j].root == call->root;
      got[i] = !earlier && receive(comm, call);
      progress |= got[i], left |= !got[i];
    }
    if (comm->aborted || (!left && !mine_left(comm))) return;
    if (!progress) wait_a_bit();
  }
}
static void run(void *argument) {
  Batch *batch = argument;
  Comm *comm = batch->comm;
  lock();
  if (comm->aborted) {
    unlock();
    return;
  }
  long number = comm->batches++;
  comm->busy++;
  begin_batch(comm->device);
  if (late_rank == comm->rank) unlock(), usleep(late_ms * 1000), lock();
  if (hang_rank == comm->rank && number >= hang_at) hang(comm);
  if (fail_rank == comm->rank && number >= fail_at) comm->failed = REMOTE, hang(comm);
  int letters = 0;
  for (int i = 0; i < batch->count && !comm->aborted; i++) {
    if (batch->calls[i].kind > RECEIVE) meet(comm, &batch->calls[i]);
    else letters = 1;
  }
  if (letters) messages(comm, batch);
  end_batch(comm->device);
  comm->busy--;
  wake();
  unlock();
}

int ncclGroupStart(void) { depth++; return SUCCESS; }
int ncclGroupEnd(void) {
  lock();
  Batch *batch = group;
  if (depth <= 0) say("ILLEGAL end of a group that was not started");
  if (--depth > 0 || !batch) {
    unlock();
    return SUCCESS;
  }
  group = 0;
  Comm *comm = batch->comm;
  if (stuck_call_rank == comm->rank) hang(comm);
  comm->begun = batch, comm->polls = 2;
  unlock();
  return IN_PROGRESS;
}
static int call(Comm *comm, Stream *stream, Call call, const char *name) {
  lock();
  int code = SUCCESS;
  if (!depth) say("ILLEGAL %s outside of a group", name);
  if (!is_live(comm, name)) code = ARGUMENT;
  else if (comm->begun || comm->splitting || comm->finalizing) say("ILLEGAL %s on a communicator that is busy", name), code = USAGE;
  else if (stream->device != comm->device) say("ILLEGAL %s on a stream of another device", name), code = USAGE;
  else if (!call.count) say("ILLEGAL %s of nothing", name);
  else if (call.root < 0 || call.root >= comm->clique->ranks) say("ILLEGAL %s with rank %d", name, call.root), code = ARGUMENT;
  else if (call.kind <= RECEIVE && call.root == comm->rank) say("ILLEGAL %s to oneself, which is a copy", name);
  else {
    if (!group) group = calloc(1, sizeof *group), group->comm = comm, group->stream = stream;
    if (group->comm != comm || group->stream != stream) say("ILLEGAL group of two communicators or streams");
    if (group->count == CALLS) abort();
    group->calls[group->count++] = call;
  }
  unlock();
  return code;
}
#define CALL(name, ...) return call(comm, stream, (Call){__VA_ARGS__}, name);
int ncclSend(uintptr_t from, size_t count, int type, int peer, Comm *comm, Stream *stream) {
  CALL("send", .kind = SEND, .from = from, .count = count, .type = type, .root = peer)
}
int ncclRecv(uintptr_t to, size_t count, int type, int peer, Comm *comm, Stream *stream) {
  CALL("receive", .kind = RECEIVE, .to = to, .count = count, .type = type, .root = peer)
}
int ncclAllGather(uintptr_t from, uintptr_t to, size_t count, int type, Comm *comm, Stream *stream) {
  CALL("all-gather", .kind = ALL_GATHER, .from = from, .to = to, .count = count, .type = type)
}
int ncclBroadcast(uintptr_t from, uintptr_t to, size_t count, int type, int root, Comm *comm, Stream *stream) {
  CALL("broadcast", .kind = BROADCAST, .from = from, .to = to, .count = count, .type = type, .root = root)
}
int ncclAllReduce(uintptr_t from, uintptr_t to, size_t count, int type, int op, Comm *comm, Stream *stream) {
  CALL("all-reduce", .kind = ALL_REDUCE, .from = from, .to = to, .count = count, .type = type, .op = op)
}
int ncclReduceScatter(uintptr_t from, uintptr_t to, size_t count, int type, int op, Comm *comm, Stream *stream) {
  CALL("reduce-scatter", .kind = REDUCE_SCATTER, .from = from, .to = to, .count = count, .type = type, .op = op)
}
#ifndef WITHOUT_ALL_TO_ALL
int ncclAlltoAll(uintptr_t from, uintptr_t to, size_t count, int type, Comm *comm, Stream *stream) {
  CALL("all-to-all", .kind = ALL_TO_ALL, .from = from, .to = to, .count = count, .type = type)
}
#endif
