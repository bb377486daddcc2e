// Trains a layer on one batch: train [TARGET] [CACHE]. The weights are the program's own: calls read
// them, and write gradients, where they lie. Prints the loss of each step and the last gradients.
#include <cstdio>
#include <cstring>
#include <map>
#include <moesaic.hpp>

using Values = std::vector<float>;

static Values wave(std::size_t count, std::size_t salt) {
  Values values(count);
  for (std::size_t i = 0; i < count; ++i)
    values[i] = float(long((i * 37 + salt * 11) % 64) - 32) / 64.0f;
  return values;
}

static void print_bits(const std::string &name, const Values &values) {
  std::printf("%s", name.c_str());
  for (float value : values) {
    unsigned bits;
    std::memcpy(&bits, &value, sizeof bits);
    std::printf(" %08x", bits);
  }
  std::printf("\n");
}

// A parameter of the program's: values and their gradient.
struct Parameter {
  Values value, gradient;
};

static void run(int argc, char **argv) {
  moesaic_engine_options options = {};
  options.target = argc > 1 ? argv[1] : "cpu";
  options.cache = argc > 2 ? argv[2] : nullptr;
  options.threads = 2;
  moesaic::Engine engine(options);
  moesaic::Spec spec("shape = { model_dim = 32, hidden_dim = 48, experts = 4, top_k = 2 }\n"
                     "losses = [{ kind = \"switch\", coefficient = 0.01 }]\n");
  auto layer = moesaic::Layer::without_weights(engine, spec);

  std::map<std::string, Parameter> parameters;
  std::size_t salt = 0;
  for (const auto &info : spec.weights()) {
    std::vector<std::int64_t> shape(info.shape, info.shape + info.dims);
    std::size_t count = 1;
    for (auto size : shape) count *= std::size_t(size);
    auto &own = parameters[info.name];
    own = {wave(count, ++salt), Values(count)};
    std::string gradient = std::string("grad.") + info.name;
    layer.bind({{info.name, own.value.data(), shape}, {gradient, own.gradient.data(), shape}});
  }

  // The rows of x lie 8 elements further apart than they are wide.
  const std::int64_t T = 5, D = 32, far = 40;
  Values x = wave(T * far, 0), y(T * D), dy(T * D), dx(T * D);
  for (std::uint64_t step = 0; step < 3; ++step) {
    auto saved = layer.forward_train(
        T, {{"x", x.data(), {T, D}, {far, 1}}, {"y", y.data(), {T, D}}}, {7, step, 0, 0});
    double loss = 0;
    for (std::size_t i = 0; i < y.size(); ++i) {
      loss += 0.5 * double(y[i]) * double(y[i]);
      dy[i] = y[i];
    }
    std::printf("loss %.9g\n", loss);
    layer.backward(saved, {{"dy", dy.data(), {T, D}}, {"dx", dx.data(), {T, D}}});
    engine.synchronize();
    for (auto &[name, own] : parameters)
      for (std::size_t i = 0; i < own.value.size(); ++i)
        own.value[i] -= 0.001953125f * own.gradient[i];
  }
  print_bits("dx", dx);
  for (const auto &[name, own] : parameters) print_bits(name, own.gradient);
}

int main(int argc, char **argv) {
  try {
    run(argc, argv);
  } catch (const moesaic::Error &error) {
    std::fprintf(stderr, "moesaic: %s\n", error.what());
    return 1;
  }
  return 0;
}
