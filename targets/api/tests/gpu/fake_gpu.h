// What the stand-ins for libcuda and libamdhip64 share: a driver whose device
// memory is host memory, and which knows three kernels. The including file names
// the functions (FN_*), says whether a thread has a device (`bound`), and whether
// a module is the caller's image or a copy of it (`IMAGE_IS_KEPT`).
//
// Streams are as late as a driver may be: nothing of their work is done before
// somebody waits for it. Until then copies have not read or written the host's
// memory, and nothing is freed.
//
// Every call goes to the file FAKE_GPU_LOG. What a driver would refuse, or
// what would be undefined, is a line that starts with ILLEGAL; what is left
// over when the process ends is a line that starts with LEAKED.
// FAKE_GPU_FAIL="function:code:skip" makes a function fail, after `skip` calls.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TEXT_OF(name) #name
#define TEXT(name) TEXT_OF(name)
#define MOST 256
#define PARAM_BYTES 128

static void say(const char *format, ...) {
  const char *path = getenv("FAKE_GPU_LOG");
  FILE *file = path ? fopen(path, "a") : 0;
  if (!file) return;
  va_list args;
  va_start(args, format);
  vfprintf(file, format, args);
  va_end(args);
  fputc('\n', file);
  fclose(file);
}

static int outcome(const char *function) {
  static int calls;
  const char *fail = getenv("FAKE_GPU_FAIL");
  size_t length = strlen(function);
  if (!fail || strncmp(fail, function, length) || fail[length] != ':') return 0;
  const char *skip = strchr(fail + length + 1, ':');
  return calls++ < (skip ? atoi(skip + 1) : 0) ? 0 : atoi(fail + length + 1);
}

// Streams, modules, functions, events, graphs, instances and memory.
typedef struct Object Object;
typedef enum { KERNEL, COPY, UPLOAD, DOWNLOAD, FREE, RECORD, WAIT } Work;
typedef struct {
  Work work;
  const char *kernel;
  char params[5][PARAM_BYTES];
  uint64_t to, from;
  size_t bytes;
  char *seen;           // of an upload: the bytes when it was asked for
  Object *object;       // what is freed, recorded, or waited for
  int position;         // of a wait: how far the other stream has to be
} Node;
struct Object {
  char kind;
  int number, live;
  Object *origin;       // of a stream: who began the capture it is part of
  int unjoined;         // of a stream: launched since the origin last waited
  int pending[MOST];    // of a stream: modules whose launches may be running
  Node *queue;          // of a stream: all of its work, done or not
  int queued, done;
  Object *stream;       // of an event: where it was recorded
  int position;         // of an event: the length of that queue
  Object *captured;     // of an event: the origin of the capture it is part of
  float time;           // of an event, once it has come to pass
  Object *module;       // of a function
  const char *name;     // of a function
  int dynamic;          // of a function: the shared memory asked for it
  Node *nodes;          // of a stream, a graph and an instance
  int count;
  uint64_t address;     // of memory, and of a module's image
  size_t bytes;
  int freed;            // of memory: its free is in a queue
  unsigned sum;         // of a module: of its image
};
static Object objects[MOST];
static int object_count;
static float now;

static int bound(void);
static int has_shared(const Object *function, unsigned dynamic);

static Object *make(char kind) {
  int number = 1;
  for (int i = 0; i < object_count; i++) number += objects[i].kind == kind;
  Object *made = &objects[object_count++];
  if (object_count == MOST) abort();
  memset(made, 0, sizeof *made);
  made->kind = kind, made->number = number, made->live = 1;
  return made;
}

static int is(Object *object, char kind) {
  int known = object >= objects && object < objects + object_count && object->live && object->kind == kind;
  if (!known) say("ILLEGAL use of something that is no live %c", kind);
  return known;
}

static Object *memory_at(uint64_t address) {
  for (int i = 0; i < object_count; i++) {
    Object *o = &objects[i];
    if (o->kind == 'a' && o->live && address >= o->address && address <= o->address + o->bytes) return o;
  }
  return 0;
}

static const char *place(uint64_t address) {
  static char texts[4][32];
  static int turn;
  char *text = texts[turn++ % 4];
  Object *o = memory_at(address);
  if (o) snprintf(text, 32, "a%d+%d", o->number, (int)(address - o->address));
  else snprintf(text, 32, "nowhere");
  return text;
}

static int within(uint64_t address, size_t bytes) {
  Object *o = memory_at(address);
  int fits = o && address + bytes <= o->address + o->bytes;
  if (!fits) say("ILLEGAL access to %zu bytes at %s", bytes, place(address));
  return fits;
}

static int capturing(const char *function) {
  for (int i = 0; i < object_count; i++) {
    if (objects[i].kind != 's' || !objects[i].live || !objects[i].origin) continue;
    say("ILLEGAL %s while s%d is capturing", function, objects[i].number);
    return 1;
  }
  return 0;
}

static Node *grow(Node **nodes, int *count, Node node) {
  *nodes = realloc(*nodes, (*count + 1) * sizeof node);
  (*nodes)[(*count)++] = node;
  return *nodes;
}

// To the graph that is being captured, or to the end of the stream.
static void enqueue(Object *stream, Node node) {
  Object *origin = stream->origin;
  if (!origin) {
    grow(&stream->queue, &stream->queued, node);
    return;
  }
  grow(&origin->nodes, &origin->count, node);
  stream->unjoined = stream != origin;
}

static void drop(Object *object);

static void scale(const Node *node) {
  float factor = *(float *)node->params[0], bias = *(float *)node->params[4];
  uint64_t from = *(uint64_t *)node->params[1], to = *(uint64_t *)node->params[2];
  int64_t count = *(int64_t *)node->params[3];
  if (!count || !within(from, count * 4) || !within(to, count * 4)) return;
  float *in = (float *)from, *out = (float *)to;
  for (int64_t i = 0; i < count; i++) out[i] = in[i] * factor + bias;
}

// All work of a stream up to a position of its queue.
static void advance(Object *stream, int position) {
  while (stream->done < position) {
    Node node = stream->queue[stream->done++];
    switch (node.work) {
      case KERNEL:
        now += 0.25f;
        if (!strcmp(node.kernel, "scale")) scale(&node);
        break;
      case COPY:
        now += 0.25f;
        if (within(node.to, node.bytes) && within(node.from, node.bytes))
          memmove((void *)node.to, (void *)node.from, node.bytes);
        break;
      case UPLOAD:
        if (memcmp(node.seen, (void *)node.from, node.bytes))
          say("ILLEGAL change of %zu bytes between their upload and its end", node.bytes);
        free(node.seen);
        if (within(node.to, node.bytes)) memcpy((void *)node.to, (void *)node.from, node.bytes);
        break;
      case DOWNLOAD:
        if (within(node.from, node.bytes)) memcpy((void *)node.to, (void *)node.from, node.bytes);
        break;
      case FREE:
        free((void *)node.object->address);
        drop(node.object);
        break;
      case RECORD:
        node.object->time = now;
        break;
      case WAIT:
        advance(node.object, node.position);
    }
  }
}

static void advance_all(void) {
  for (int i = 0; i < object_count; i++)
    if (objects[i].kind == 's') advance(&objects[i], objects[i].queued);
}

// Whether the stream's work from some position on reads or writes this memory
// of the host.
static int in_flight(uint64_t address, size_t bytes) {
  for (int i = 0; i < object_count; i++)
    for (int n = objects[i].done; objects[i].kind == 's' && n < objects[i].queued; n++) {
      const Node *node = &objects[i].queue[n];
      uint64_t host = node->work == UPLOAD ? node->from : node->work == DOWNLOAD ? node->to : 0;
      if (host >= address && host < address + bytes) return 1;
    }
  return 0;
}

static void drop(Object *object) {
  object->live = 0;
  free(object->nodes), object->nodes = 0;
}

__attribute__((destructor)) static void end(void) {
  for (int i = 0; i < object_count; i++)
    if (objects[i].live && objects[i].kind != 'f') say("LEAKED %c%d", objects[i].kind, objects[i].number);
}

// One call at a time: the driver's own state is not the test.
static pthread_mutex_t turn = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static void end_turn(void *unused) { pthread_mutex_unlock(&turn); }

// First lines of every function.
#define ENTER(function)                                                      \
  const char *self = TEXT(function);                                         \
  __attribute__((cleanup(end_turn))) int locked = pthread_mutex_lock(&turn); \
  if (!bound()) {                                                            \
    say("ILLEGAL %s on a thread without a device", self);                    \
    return 201;                                                              \
  }                                                                          \
  int code = outcome(self);

int FN_memory_info(size_t *available, size_t *total) {
  ENTER(FN_memory_info)
  *available = 4096, *total = 150754820096ull;
  return code;
}
int FN_default_pool(void **pool, int device) {
  static int the_pool;
  *pool = &the_pool;
  return outcome(TEXT(FN_default_pool));
}
int FN_pool_set(void *pool, int attribute, uint64_t *value) {
  say("pool attribute %d = %llx", attribute, (unsigned long long)*value);
  return outcome(TEXT(FN_pool_set));
}
int FN_pool_access(void *pool, const int *access, size_t count) {
  ENTER(FN_pool_access)
  for (size_t i = 0; i < count; i++) say("pool access %d of place %d %d", access[3 * i + 2], access[3 * i], access[3 * i + 1]);
  return code;
}
int FN_can_access_peer(int *can, int device, int peer) {
  ENTER(FN_can_access_peer)
  say("peer %d of %d", peer, device);
  *can = peer < 2;
  return code ? code : peer < 2 ? 0 : 101;
}

int FN_stream_create(void **stream, unsigned flags) {
  ENTER(FN_stream_create)
  if (code) return code;
  Object *made = make('s');
  say("create s%d flags %u", made->number, flags);
  *stream = made;
  return 0;
}
int FN_stream_destroy(Object *s) {
  ENTER(FN_stream_destroy)
  if (!is(s, 's')) return 400;
  say("destroy s%d", s->number);
  if (s->origin) say("ILLEGAL destruction of a stream that captures");
  advance(s, s->queued);
  if (!code) drop(s);
  return code;
}
int FN_stream_synchronize(Object *s) {
  ENTER(FN_stream_synchronize)
  if (!is(s, 's')) return 400;
  say("synchronize s%d", s->number);
  if (s->origin) return say("ILLEGAL synchronize of a stream that captures"), 900;
  // A wait that fails says that work has failed: it is over all the same.
  advance(s, s->queued);
  if (!code) memset(s->pending, 0, sizeof s->pending);
  return code;
}
int FN_stream_wait(Object *s, Object *e, unsigned flags) {
  ENTER(FN_stream_wait)
  if (!is(s, 's') || !is(e, 'e')) return 400;
  say("s%d waits for e%d flags %u", s->number, e->number, flags);
  if (code) return code;
  if (!e->stream) return say("ILLEGAL wait for an event that was not recorded"), 400;
  if (!!s->origin > !!e->captured) return say("ILLEGAL dependency on work outside of the capture"), 905;
  if (e->captured && !s->origin) s->origin = e->captured;
  if (s->origin == s) e->stream->unjoined = 0;
  if (!s->origin) enqueue(s, (Node){.work = WAIT, .object = e->stream, .position = e->position});
  return 0;
}

static int allocate(uint64_t *address, size_t bytes, int code, const char *suffix) {
  void *memory = code ? 0 : aligned_alloc(256, (bytes + 255) / 256 * 256);
  if (!memory) return say("alloc %zu%s fails", bytes, suffix), code ? code : 2;
  Object *made = make('a');
  say("alloc a%d of %zu%s", made->number, bytes, suffix);
  made->bytes = bytes;
  made->address = *address = (uint64_t)memory;
  memset(memory, 0xa5, bytes);
  return 0;
}
// On a stream, or once all streams have finished.
static int release(uint64_t address, int code, Object *s) {
  Object *o = memory_at(address);
  char suffix[16] = "";
  if (!o || o->address != address || o->freed) return say("ILLEGAL free of what is not allocated"), 400;
  if (s) snprintf(suffix, 16, " on s%d", s->number);
  say("free a%d%s", o->number, suffix);
  if (code) return code;
  o->freed = 1;
  if (s) return enqueue(s, (Node){.work = FREE, .object = o}), 0;
  advance_all();
  free((void *)address);
  drop(o);
  return 0;
}
int FN_alloc_async(uint64_t *address, size_t bytes, Object *s) {
  ENTER(FN_alloc_async)
  if (!is(s, 's')) return 400;
  if (s->origin) say("ILLEGAL allocation while capturing");
  char suffix[16];
  snprintf(suffix, 16, " on s%d", s->number);
  return allocate(address, bytes, code, suffix);
}
int FN_free_async(uint64_t address, Object *s) {
  ENTER(FN_free_async)
  if (!is(s, 's')) return 400;
  if (s->origin) return say("ILLEGAL free while capturing"), 900;
  return release(address, code, s);
}
int FN_alloc(uint64_t *address, size_t bytes) {
  ENTER(FN_alloc)
  capturing(self);
  return allocate(address, bytes, code, "");
}
int FN_free(uint64_t address) {
  ENTER(FN_free)
  capturing(self);
  return release(address, code, 0);
}
int FN_host_alloc(void **address, size_t bytes, unsigned flags) {
  ENTER(FN_host_alloc)
  capturing(self);
  say("pin %zu flags %u", bytes, flags);
  if (code) return code;
  Object *made = make('h');
  *address = malloc(bytes);
  made->address = (uint64_t)*address, made->bytes = bytes;
  memset(*address, 0x5a, bytes);
  return 0;
}
static Object *host_at(uint64_t address) {
  for (int i = 0; i < object_count; i++) {
    Object *o = &objects[i];
    if (o->kind == 'h' && o->live && address >= o->address && address < o->address + o->bytes) return o;
  }
  return 0;
}
int FN_host_free(void *address) {
  ENTER(FN_host_free)
  Object *o = host_at((uint64_t)address);
  if (!o) return say("ILLEGAL free of what is not pinned"), 400;
  say("unpin %zu", o->bytes);
  if (in_flight(o->address, o->bytes)) say("ILLEGAL free of memory that a copy may be using");
  if (code) return code;
  o->live = 0;
  free(address);
  return 0;
}
int FN_upload(uint64_t to, const void *from, size_t bytes, Object *s) {
  ENTER(FN_upload)
  if (!is(s, 's')) return 400;
  say("upload %zu to %s on s%d", bytes, place(to), s->number);
  if (s->origin) return say("ILLEGAL upload while capturing"), 900;
  if (code) return code;
  Node node = {.work = UPLOAD, .to = to, .from = (uint64_t)from, .bytes = bytes, .seen = malloc(bytes)};
  memcpy(node.seen, from, bytes);
  enqueue(s, node);
  return 0;
}
int FN_download(void *to, uint64_t from, size_t bytes, Object *s) {
  ENTER(FN_download)
  if (!is(s, 's')) return 400;
  say("download %zu from %s on s%d", bytes, place(from), s->number);
  if (s->origin) return say("ILLEGAL download while capturing"), 900;
  if (code) return code;
  enqueue(s, (Node){.work = DOWNLOAD, .to = (uint64_t)to, .from = from, .bytes = bytes});
  return 0;
}
int FN_copy(uint64_t to, uint64_t from, size_t bytes, Object *s) {
  ENTER(FN_copy)
  if (!is(s, 's')) return 400;
  say("copy %zu from %s to %s on s%d", bytes, place(from), place(to), s->number);
  if (code) return code;
  enqueue(s, (Node){.work = COPY, .to = to, .from = from, .bytes = bytes});
  return 0;
}

static int copy_rows(int code, uint64_t to, size_t to_stride, uint64_t from, size_t from_stride, size_t bytes,
                     size_t rows, Object *s) {
  if (!is(s, 's')) return 400;
  say("copy %zu rows of %zu from %s by %zu to %s by %zu on s%d", rows, bytes, place(from), from_stride, place(to),
      to_stride, s->number);
  if (code) return code;
  for (size_t i = 0; i < rows; i++)
    enqueue(s, (Node){.work = COPY, .to = to + i * to_stride, .from = from + i * from_stride, .bytes = bytes});
  return 0;
}

// Enough of an image to see that it is another: its header.
static unsigned sum_of(const void *image) {
  unsigned sum = 1;
  for (int i = 0; i < 64; i++) sum = sum * 31 + ((const unsigned char *)image)[i];
  return sum;
}
static void check_image(const Object *m) {
  if (IMAGE_IS_KEPT && sum_of((void *)m->address) != m->sum) say("ILLEGAL change of the image of m%d", m->number);
}
int FN_module_load(void **module, const void *image) {
  ENTER(FN_module_load)
  capturing(self);
  Object *made = code ? 0 : make('m');
  say("load m%d, %s", made ? made->number : 0, memcmp(image, "\x7f" "ELF", 4) ? "rubbish" : "an ELF file");
  if (made) made->address = (uint64_t)image, made->sum = sum_of(image);
  *module = made;
  return code;
}
int FN_module_unload(Object *m) {
  ENTER(FN_module_unload)
  if (!is(m, 'm')) return 400;
  say("unload m%d", m->number);
  check_image(m);
  capturing(self);
  for (int i = 0; i < object_count; i++)
    if (objects[i].kind == 's' && objects[i].live && objects[i].pending[m->number])
      say("ILLEGAL unload of m%d, which may be running on s%d", m->number, objects[i].number);
  if (!code) drop(m);
  return code;
}
int FN_module_function(void **function, Object *m, const char *name) {
  static const char *const known[] = {"scale", "mapped", "crash"};
  ENTER(FN_module_function)
  if (!is(m, 'm')) return 400;
  check_image(m);
  if (code) return code;
  for (int i = 0; i < 3; i++) {
    if (strcmp(known[i], name)) continue;
    Object *made = make('f');
    made->module = m, made->name = known[i];
    *function = made;
    return 0;
  }
  return 500;
}

// Params as `scale` and `mapped` take them.
static const char *list(const char *kernel, void **params) {
  static char text[128];
  if (!strcmp(kernel, "scale"))
    snprintf(text, sizeof text, "%g %s %s %lld %g", *(float *)params[0], place(*(uint64_t *)params[1]),
             place(*(uint64_t *)params[2]), (long long)*(int64_t *)params[3], *(float *)params[4]);
  else if (!strcmp(kernel, "mapped"))
    snprintf(text, sizeof text, "%.8s %s", (char *)params[0], place(*(uint64_t *)params[1]));
  else
    snprintf(text, sizeof text, "none");
  return text;
}
static int start(int code, Object *f, const unsigned *shape, unsigned shared, Object *s, void **params, const char *extra) {
  if (!is(f, 'f') || !is(f->module, 'm') || !is(s, 's')) return 400;
  check_image(f->module);
  say("launch %s grid %u %u %u block %u %u %u shared %u%s on s%d params %s", f->name, shape[0], shape[1], shape[2],
      shape[3], shape[4], shape[5], shared, extra, s->number, list(f->name, params));
  if (code) return code;
  if (!has_shared(f, shared)) return say("ILLEGAL amount of shared memory"), 1;
  Node node = {.work = KERNEL, .kernel = f->name};
  int count = !strcmp(f->name, "scale") ? 5 : !strcmp(f->name, "mapped") ? 2 : 0;
  for (int i = 0; i < count; i++) memcpy(node.params[i], params[i], PARAM_BYTES);
  if (!s->origin) s->pending[f->module->number] = 1;
  enqueue(s, node);
  return 0;
}
int FN_launch(Object *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
              Object *s, void **params, void **extra) {
  ENTER(FN_launch)
  if (extra) say("ILLEGAL second list of params");
  unsigned shape[] = {gx, gy, gz, bx, by, bz};
  return start(code, f, shape, shared, s, params, "");
}
int FN_occupancy(int *blocks, Object *f, int threads, size_t shared) {
  ENTER(FN_occupancy)
  if (!is(f, 'f')) return 400;
  say("occupancy of %s at %d threads and %zu bytes", f->name, threads, shared);
  *blocks = 2048 / threads;
  return code;
}

int FN_event_create(void **event, unsigned flags) {
  ENTER(FN_event_create)
  if (code) return code;
  Object *made = make('e');
  say("create e%d flags %u", made->number, flags);
  *event = made;
  return 0;
}
int FN_event_record(Object *e, Object *s) {
  ENTER(FN_event_record)
  if (!is(e, 'e') || !is(s, 's')) return 400;
  say("record e%d on s%d", e->number, s->number);
  if (code) return code;
  e->stream = s, e->captured = s->origin;
  if (!s->origin) enqueue(s, (Node){.work = RECORD, .object = e});
  e->position = s->queued;
  return 0;
}
int FN_event_query(Object *e) {
  ENTER(FN_event_query)
  if (!is(e, 'e')) return 400;
  say("query e%d", e->number);
  if (!e->stream || e->captured) return say("ILLEGAL query of an event that never happens"), 907;
  if (code) return code;
  return e->stream->done >= e->position ? 0 : 600;
}
int FN_event_synchronize(Object *e) {
  ENTER(FN_event_synchronize)
  if (!is(e, 'e')) return 400;
  say("synchronize e%d", e->number);
  if (!e->stream || e->captured) return say("ILLEGAL synchronize of an event that never happens"), 907;
  if (!code) advance(e->stream, e->position);
  return code;
}
int FN_event_elapsed(float *milliseconds, Object *start, Object *end) {
  ENTER(FN_event_elapsed)
  if (!is(start, 'e') || !is(end, 'e')) return 400;
  say("elapsed e%d to e%d", start->number, end->number);
  if (start->stream->done < start->position || end->stream->done < end->position)
    return say("ILLEGAL time between events that have not come to pass"), 600;
  *milliseconds = end->time - start->time;
  return code;
}
int FN_event_destroy(Object *e) {
  ENTER(FN_event_destroy)
  if (!is(e, 'e')) return 400;
  say("destroy e%d", e->number);
  if (!code) drop(e);
  return code;
}

int FN_capture_begin(Object *s, int mode) {
  ENTER(FN_capture_begin)
  if (!is(s, 's')) return 400;
  say("begin capture on s%d mode %d", s->number, mode);
  if (code) return code;
  if (s->origin) return say("ILLEGAL second capture"), 900;
  s->origin = s, s->nodes = 0, s->count = 0;
  return 0;
}
int FN_capture_end(Object *s, void **graph) {
  ENTER(FN_capture_end)
  if (!is(s, 's')) return 400;
  say("end capture on s%d", s->number);
  if (s->origin != s) return say("ILLEGAL end of a capture"), 901;
  int unjoined = 0;
  for (int i = 0; i < object_count; i++)
    if (objects[i].kind == 's' && objects[i].live && objects[i].origin == s) {
      unjoined |= objects[i].unjoined;
      objects[i].origin = 0, objects[i].unjoined = 0;
    }
  *graph = 0;
  if (code || unjoined) return code ? code : 904;
  Object *made = make('g');
  made->nodes = s->nodes, made->count = s->count, s->nodes = 0;
  *graph = made;
  return 0;
}
int FN_graph_instantiate(void **instance, Object *g, unsigned long long flags) {
  ENTER(FN_graph_instantiate)
  if (!is(g, 'g')) return 400;
  say("instantiate g%d flags %llu with %d nodes", g->number, flags, g->count);
  if (code) return code;
  Object *made = make('x');
  made->nodes = malloc(g->count * sizeof(Node) + 1), made->count = g->count;
  memcpy(made->nodes, g->nodes, g->count * sizeof(Node));
  *instance = made;
  return 0;
}
int FN_graph_launch(Object *x, Object *s) {
  ENTER(FN_graph_launch)
  if (!is(x, 'x') || !is(s, 's')) return 400;
  say("launch x%d on s%d", x->number, s->number);
  if (s->origin) say("ILLEGAL launch of a graph while capturing");
  if (code) return code;
  for (int i = 0; i < object_count; i++)
    if (objects[i].kind == 'm' && objects[i].live) s->pending[objects[i].number] = 1;
  for (int i = 0; i < x->count; i++) enqueue(s, x->nodes[i]);
  return 0;
}
int FN_graph_destroy(Object *g) {
  ENTER(FN_graph_destroy)
  if (!is(g, 'g')) return 400;
  say("destroy g%d", g->number);
  if (!code) drop(g);
  return code;
}
int FN_exec_destroy(Object *x) {
  ENTER(FN_exec_destroy)
  if (!is(x, 'x')) return 400;
  say("destroy x%d", x->number);
  if (!code) drop(x);
  return code;
}
