// Evaluates a layer: forward [TARGET] [CACHE]. Prints y and the experts of each token.
#include "common.h"

int main(int argc, char **argv) {
  moesaic_engine_options options = {0};
  options.target = argc > 1 ? argv[1] : "cpu";
  options.cache = argc > 2 ? argv[2] : NULL;
  options.threads = 2;
  moesaic_engine *engine;
  check(moesaic_engine_open(&options, &engine));

  moesaic_spec *spec;
  check(moesaic_spec_from_toml(
      "shape = { model_dim = 32, hidden_dim = 48, experts = 4, top_k = 2 }\n"
      "router = { renormalize = \"sum\" }\n",
      &spec));

  // The layer copies its weights, so they may go.
  weights made = make_weights(spec);
  moesaic_layer *layer;
  check(moesaic_layer_open(engine, spec, made.tensors, made.count, NULL, &layer));
  free_weights(made);

  enum { T = 3, D = 32, K = 2 };
  float *x = wave(T * D, 0), y[T * D], gates[T * K];
  int32_t ids[T * K];
  const int64_t rows[] = {T, D}, slots[] = {T, K};
  moesaic_tensor tensors[] = {
      f32("x", x, 2, rows),
      f32("y", y, 2, rows),
      f32("topk_weights", gates, 2, slots),
      {"topk_ids", ids, MOESAIC_DTYPE_I32, 2, slots, NULL},
  };
  moesaic_call call = {T, tensors, 4, 0};
  check(moesaic_forward(layer, &call));
  check(moesaic_engine_synchronize(engine));
  print_bits(stdout, "y", y, T * D);
  print_bits(stdout, "topk_weights", gates, T * K);
  printf("topk_ids");
  for (size_t i = 0; i < T * K; ++i) printf(" %d", ids[i]);
  printf("\n");

  // An error has a text.
  call.tensor_count = 0;
  if (moesaic_forward(layer, &call) == MOESAIC_STATUS_INVALID)
    printf("without x: %s\n", moesaic_last_error());

  free(x);
  moesaic_layer_free(layer);
  moesaic_spec_free(spec);
  moesaic_engine_free(engine);
  return 0;
}
