// Training with the experts that other layers chose: replay [TARGET] [CACHE]. Records two layers,
// saves and reads the record, and runs both passes of a layer that replays the second of them.
#include "common.h"

enum { T = 5, D = 32, E = 4, K = 2, LAYERS = 2 };

static const char *SPEC = "shape = { model_dim = 32, hidden_dim = 48, experts = 4, top_k = 2 }";
static const char *FILE_NAME = "routed_experts.npy";

static moesaic_tensor i32(const char *name, int32_t *data, size_t dims, const int64_t *shape) {
  moesaic_tensor tensor = f32(name, NULL, dims, shape);
  tensor.data = data;
  tensor.dtype = MOESAIC_DTYPE_I32;
  return tensor;
}

// Evaluates the layers of a model, each of which writes its experts into the record.
static moesaic_record *recorded(moesaic_engine *engine, moesaic_spec *spec, weights made,
                                float *x) {
  int32_t ids[T * LAYERS * K];
  const int64_t rows[] = {T, D}, own[] = {T, K}, all[] = {T, LAYERS, K};
  const int64_t strides[] = {LAYERS * K, 1}, router[] = {E, D};
  for (size_t number = 0; number < LAYERS; ++number) {
    moesaic_layer *layer;
    check(moesaic_layer_open(engine, spec, made.tensors, made.count, NULL, &layer));
    float *logits = wave(E * D, 20 + number);
    moesaic_tensor weight = f32("router.weight", logits, 2, router);
    check(moesaic_layer_set_weight(layer, &weight));
    free(logits);
    moesaic_tensor tensors[] = {f32("x", x, 2, rows), i32("topk_ids", ids + number * K, 2, own)};
    tensors[1].strides = strides;
    moesaic_call call = {T, tensors, 2, 0};
    check(moesaic_route(layer, &call));
    moesaic_layer_free(layer);
  }
  moesaic_tensor tensor = i32("routed_experts", ids, 3, all);
  moesaic_record *record;
  check(moesaic_record_open(&tensor, &record));
  return record;
}

int main(int argc, char **argv) {
  moesaic_engine_options options = {0};
  options.target = argc > 1 ? argv[1] : "cpu";
  options.cache = argc > 2 ? argv[2] : NULL;
  options.threads = 2;
  moesaic_engine *engine;
  moesaic_spec *spec, *replayed;
  check(moesaic_engine_open(&options, &engine));
  check(moesaic_spec_from_toml(SPEC, &spec));
  weights made = make_weights(spec);
  float *x = wave(T * D, 0);
  moesaic_record *record = recorded(engine, spec, made, x);
  check(moesaic_record_write(record, FILE_NAME));
  moesaic_record_free(record);
  check(moesaic_record_read(FILE_NAME, &record));
  remove(FILE_NAME);
  size_t sizes[3];
  check(moesaic_record_sizes(record, sizes));
  printf("record of %zu tokens, %zu layers, %zu experts\n", sizes[0], sizes[1], sizes[2]);

  int32_t table[T * K];
  check(moesaic_record_replay(record, spec, 1, table, T * K, &replayed));
  moesaic_record_free(record);
  const int64_t slots[] = {T, K};
  moesaic_tensor all[16] = {i32("router.table", table, 2, slots)};
  for (size_t i = 0; i < made.count; ++i) all[i + 1] = made.tensors[i];
  moesaic_layer_options training = {0};
  training.training = 1;
  moesaic_layer *layer;
  check(moesaic_layer_open(engine, replayed, all, made.count + 1, &training, &layer));
  free_weights(made);

  // A micro-batch: three rows of the record, in an order of its own.
  enum { PART = 3 };
  int32_t places[PART] = {4, 0, 2}, chosen[PART * K];
  float rows[PART * D], y[PART * D], gradient[E * D];
  for (size_t i = 0; i < PART; ++i) memcpy(rows + i * D, x + places[i] * D, D * sizeof *x);
  const int64_t some[] = {PART, D}, tokens[] = {PART}, ids[] = {PART, K};
  moesaic_tensor tensors[] = {f32("x", rows, 2, some), i32("token_ids", places, 1, tokens),
                              f32("y", y, 2, some), i32("topk_ids", chosen, 2, ids)};
  moesaic_call call = {PART, tensors, 4, 0};
  moesaic_saved *saved;
  check(moesaic_forward_train(layer, &call, NULL, &saved));
  printf("experts");
  for (size_t i = 0; i < PART * K; ++i) printf(" %d", chosen[i]);
  printf("\n");
  print_bits(stdout, "y", y, PART * D);
  moesaic_tensor dy = f32("dy", y, 2, some);
  check(moesaic_backward(layer, saved, &dy, 1, 0));
  check(moesaic_layer_gradient(layer, "router.weight", gradient, E * D));
  print_bits(stdout, "gradient", gradient, E * D);

  moesaic_saved_free(saved);
  moesaic_layer_free(layer);
  free(x);
  moesaic_spec_free(replayed);
  moesaic_spec_free(spec);
  moesaic_engine_free(engine);
  return 0;
}
