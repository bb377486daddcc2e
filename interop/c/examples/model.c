// Runs a layer of a model in two threads at once: model TARGET CACHE FOLDER. The folder has a model
// in bf16, in the form of transformers. Prints y of each thread.
#include "common.h"
#include <pthread.h>

enum { T = 3, D = 32, THREADS = 2, CALLS = 20 };

// A thread's layer, tokens and results.
typedef struct {
  moesaic_layer *layer;
  uint16_t x[T * D], y[T * D];
} job;

// A bf16 is the upper half of a float.
static uint16_t narrow(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return (uint16_t)(bits >> 16);
}

static float widen(uint16_t value) {
  uint32_t bits = (uint32_t)value << 16;
  float wide;
  memcpy(&wide, &bits, sizeof wide);
  return wide;
}

static void *work(void *argument) {
  job *own = argument;
  const int64_t rows[] = {T, D};
  moesaic_tensor tensors[] = {
      {"x", own->x, MOESAIC_DTYPE_BF16, 2, rows, NULL},
      {"y", own->y, MOESAIC_DTYPE_BF16, 2, rows, NULL},
  };
  const moesaic_call call = {T, tensors, 2, 0};
  for (int i = 0; i < CALLS; ++i) check(moesaic_forward(own->layer, &call));
  return NULL;
}

int main(int argc, char **argv) {
  if (argc != 4) return fprintf(stderr, "model TARGET CACHE FOLDER\n"), 2;
  moesaic_engine_options options = {0};
  options.target = argv[1];
  options.cache = argv[2];
  options.threads = 2;
  moesaic_engine *engine;
  check(moesaic_engine_open(&options, &engine));
  static job jobs[THREADS];
  check(moesaic_layer_from_hf(engine, argv[3], 0, &jobs[0].layer));
  // Calls of one layer would take turns; a handle has the same weights and a workspace of its own.
  check(moesaic_layer_handle(jobs[0].layer, &jobs[1].layer));

  moesaic_tensor_info info;
  check(moesaic_layer_find(jobs[0].layer, "x", T, &info));
  if (info.dtype != MOESAIC_DTYPE_BF16 || info.shape[1] != D)
    return fprintf(stderr, "the model is none of bf16 with %d numbers a token\n", D), 1;
  for (int i = 0; i < THREADS; ++i) {
    float *values = wave(T * D, (size_t)i);
    for (int j = 0; j < T * D; ++j) jobs[i].x[j] = narrow(values[j]);
    free(values);
  }

  pthread_t thread;
  if (pthread_create(&thread, NULL, work, &jobs[1])) return 1;
  work(&jobs[0]);
  pthread_join(thread, NULL);
  for (int i = 0; i < THREADS; ++i) {
    float y[T * D];
    for (int j = 0; j < T * D; ++j) y[j] = widen(jobs[i].y[j]);
    print_bits(stdout, "y", y, T * D);
    moesaic_layer_free(jobs[i].layer);
  }
  moesaic_engine_free(engine);
  return 0;
}
