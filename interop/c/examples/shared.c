// Layers that share experts: shared [TARGET] [CACHE]. A second layer over the experts of a first,
// then two routers over one set of experts, on all tokens and on some each. Prints results and gradients.
#include "common.h"

enum { T = 3, D = 32, E = 4, ROUTERS = 2, ELEMENTS = 4 * 32 * 48 };

static const char *FIRST = "shape = { model_dim = 32, hidden_dim = 48, experts = 4, top_k = 2 }";
static const char *SECOND = "shape = { model_dim = 32, hidden_dim = 48, experts = 4, top_k = 3 }\n"
                            "router = { score = \"sigmoid\" }";

// Runs both passes of a layer, whose gradients are added to.
static void step(moesaic_layer *layer, float *x, float *y) {
  const int64_t rows[] = {T, D};
  moesaic_tensor tensors[] = {f32("x", x, 2, rows), f32("y", y, 2, rows)};
  moesaic_call call = {T, tensors, 2, 0};
  moesaic_saved *saved;
  check(moesaic_forward_train(layer, &call, NULL, &saved));
  moesaic_tensor dy = f32("dy", y, 2, rows); // of the loss y*y/2
  check(moesaic_backward(layer, saved, &dy, 1, 1));
  moesaic_saved_free(saved);
}

static void share_a_bank(moesaic_engine *engine, float *x) {
  moesaic_spec *specs[2];
  check(moesaic_spec_from_toml(FIRST, &specs[0]));
  check(moesaic_spec_from_toml(SECOND, &specs[1]));
  weights made = make_weights(specs[0]);
  moesaic_layer_options options = {0};
  options.training = 1;
  moesaic_layer *bank, *layer;
  check(moesaic_layer_open(engine, specs[0], made.tensors, made.count, &options, &bank));
  // The first weight is the router's, all that the second layer has of its own.
  check(moesaic_layer_over_experts_of(engine, bank, specs[1], made.tensors, 1, &layer));
  free_weights(made);

  float y[T * D], *gradient = malloc(ELEMENTS * sizeof *gradient);
  check(moesaic_layer_zero_gradients(bank));
  check(moesaic_layer_zero_gradients(layer));
  step(bank, x, y);
  print_bits(stdout, "bank", y, T * D);
  step(layer, x, y);
  print_bits(stdout, "layer", y, T * D);
  check(moesaic_layer_gradient(bank, "experts.down.weight", gradient, ELEMENTS));
  print_bits(stdout, "gradient", gradient, ELEMENTS);
  free(gradient);
  moesaic_layer_free(bank); // The other layer keeps the experts.
  step(layer, x, y);
  print_bits(stdout, "layer", y, T * D);
  moesaic_layer_free(layer);
  moesaic_spec_free(specs[0]);
  moesaic_spec_free(specs[1]);
}

// Each token runs by one of the routers.
static void route_by_token(moesaic_multi_gate *gates, float *x) {
  int32_t numbers[T] = {1, 0, 1};
  float y[T * D], dx[T * D], gradient[E * D];
  const int64_t rows[] = {T, D}, tokens[] = {T};
  moesaic_tensor ids = f32("router_ids", NULL, 1, tokens);
  ids.data = numbers;
  ids.dtype = MOESAIC_DTYPE_I32;
  moesaic_tensor tensors[] = {f32("x", x, 2, rows), ids, f32("y", y, 2, rows)};
  moesaic_call call = {T, tensors, 3, 0};
  check(moesaic_multi_gate_forward(gates, &call));
  print_bits(stdout, "y by token", y, T * D);
  moesaic_multi_saved *saved;
  check(moesaic_multi_gate_forward_train(gates, &call, NULL, &saved));
  moesaic_tensor back[] = {f32("dy", y, 2, rows), f32("dx", dx, 2, rows)};
  check(moesaic_multi_gate_backward(gates, saved, back, 2, 0));
  print_bits(stdout, "dx by token", dx, T * D);
  check(moesaic_multi_gate_gradient(gates, 1, "router.weight", gradient, E * D));
  print_bits(stdout, "gradient", gradient, E * D);
  moesaic_multi_saved_free(saved);
}

static void share_by_routers(moesaic_engine *engine, float *x) {
  moesaic_spec *spec;
  check(moesaic_spec_from_toml(FIRST, &spec));
  weights made = make_weights(spec);
  float *second = wave(E * D, 7);
  const int64_t shape[] = {E, D};
  moesaic_tensor router = f32("router.weight", second, 2, shape);
  const moesaic_tensor_list routers[] = {{made.tensors, 1}, {&router, 1}};
  moesaic_layer_options options = {0};
  options.training = 1;
  moesaic_multi_gate *gates;
  check(moesaic_multi_gate_open(engine, spec, made.tensors + 1, made.count - 1, routers, ROUTERS,
                                &options, &gates));
  free_weights(made);
  free(second);
  printf("in one pass %d\n", moesaic_multi_gate_in_one_pass(gates));

  float y[ROUTERS * T * D], dx[ROUTERS * T * D], gradient[E * D];
  const int64_t rows[] = {T, D}, all[] = {ROUTERS, T, D};
  moesaic_tensor tensors[] = {f32("x", x, 2, rows), f32("y", y, 3, all)};
  moesaic_call call = {T, tensors, 2, 0};
  check(moesaic_multi_gate_forward(gates, &call));
  print_bits(stdout, "y", y, ROUTERS * T * D);
  moesaic_multi_saved *saved;
  check(moesaic_multi_gate_forward_train(gates, &call, NULL, &saved));
  moesaic_tensor back[] = {f32("dy", y, 3, all), f32("dx", dx, 3, all)};
  check(moesaic_multi_gate_backward(gates, saved, back, 2, 0));
  print_bits(stdout, "dx", dx, ROUTERS * T * D);
  for (size_t gate = 0; gate < ROUTERS; ++gate) {
    check(moesaic_multi_gate_gradient(gates, gate, "router.weight", gradient, E * D));
    print_bits(stdout, "gradient", gradient, E * D);
  }
  moesaic_multi_saved_free(saved);
  route_by_token(gates, x);
  moesaic_multi_gate_free(gates);
  moesaic_spec_free(spec);
}

int main(int argc, char **argv) {
  moesaic_engine_options options = {0};
  options.target = argc > 1 ? argv[1] : "cpu";
  options.cache = argc > 2 ? argv[2] : NULL;
  options.threads = 2;
  moesaic_engine *engine;
  check(moesaic_engine_open(&options, &engine));
  float *x = wave(T * D, 0);
  share_a_bank(engine, x);
  share_by_routers(engine, x);
  free(x);
  moesaic_engine_free(engine);
  return 0;
}
