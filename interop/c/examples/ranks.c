// Spreads the experts of a layer over ranks: ranks [TARGET] [CACHE] [mpi]. Two ranks are threads of
// this process; with `mpi` each process of `mpirun` is one. Each has its own tokens. Prints y and
// the gradient of the router, which all ranks have alike.
#include "common.h"
#include <pthread.h>

typedef struct {
  moesaic_engine *engine;
  moesaic_world *world;
  char *report;
} rank_task;

static void *run_rank(void *argument) {
  rank_task *task = argument;
  size_t rank, size;
  check(moesaic_world_rank(task->world, &rank, &size));
  moesaic_parallel parallel = {0};
  parallel.ep = size;
  moesaic_mesh *mesh;
  check(moesaic_mesh_open(task->world, &parallel, &mesh));

  moesaic_spec *spec;
  check(moesaic_spec_from_toml(
      "shape = { model_dim = 32, hidden_dim = 48, experts = 4, top_k = 2 }", &spec));
  // The weights are those of the whole layer; a rank keeps its own experts.
  weights made = make_weights(spec);
  moesaic_layer_options options = {0};
  options.training = 1;
  options.mesh = mesh;
  moesaic_layer *layer;
  check(moesaic_layer_open(task->engine, spec, made.tensors, made.count, &options, &layer));
  free_weights(made);
  check(moesaic_layer_set_strategy(layer, "overlap_degree=2"));

  enum { D = 32, E = 4 };
  const size_t T = 3 + rank;
  float *x = wave(T * D, rank), *y = wave(T * D, 9), gradient[E * D];
  const int64_t rows[] = {(int64_t)T, D};
  moesaic_tensor tensors[] = {f32("x", x, 2, rows), f32("y", y, 2, rows)};
  moesaic_call call = {T, tensors, 2, 0};
  moesaic_saved *saved;
  check(moesaic_forward_train(layer, &call, NULL, &saved));
  moesaic_tensor dy = f32("dy", y, 2, rows); // of the loss y*y/2
  check(moesaic_backward(layer, saved, &dy, 1, 0));
  check(moesaic_layer_reduce_gradients(layer, 0));
  check(moesaic_layer_gradient(layer, "router.weight", gradient, E * D));

  FILE *report = fmemopen(task->report, 1 << 16, "w");
  fprintf(report, "rank %zu of %zu\n", rank, size);
  print_bits(report, "y", y, T * D);
  print_bits(report, "gradient", gradient, E * D);
  fclose(report);
  free(x);
  free(y);
  moesaic_saved_free(saved);
  moesaic_layer_free(layer);
  moesaic_spec_free(spec);
  moesaic_mesh_free(mesh);
  check(moesaic_world_finish(task->world));
  return NULL;
}

int main(int argc, char **argv) {
  moesaic_engine_options options = {0};
  options.target = argc > 1 ? argv[1] : "cpu";
  options.cache = argc > 2 ? argv[2] : NULL;
  options.threads = 2;
  moesaic_engine *engine;
  check(moesaic_engine_open(&options, &engine));

  enum { RANKS = 2 };
  moesaic_world *worlds[RANKS];
  rank_task tasks[RANKS];
  pthread_t threads[RANKS];
  size_t count = RANKS;
  if (argc > 3 && !strcmp(argv[3], "mpi")) {
    count = 1;
    check(moesaic_world_mpi(engine, NULL, 0, worlds));
  } else {
    check(moesaic_world_threads(engine, RANKS, 0, worlds));
  }
  for (size_t i = 0; i < count; ++i) {
    tasks[i] = (rank_task){engine, worlds[i], calloc(1, 1 << 16)};
    if (!tasks[i].report || pthread_create(&threads[i], NULL, run_rank, &tasks[i])) return 1;
  }
  for (size_t i = 0; i < count; ++i) {
    pthread_join(threads[i], NULL);
    printf("%s", tasks[i].report);
    free(tasks[i].report);
  }
  moesaic_engine_free(engine);
  return 0;
}
