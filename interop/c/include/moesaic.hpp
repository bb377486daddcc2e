// moesaic for C++17: owners of the handles of moesaic.h, and errors as exceptions. A header alone.
//
// The rules of moesaic.h hold: what a function reads, keeps and frees, and which threads may call.
#ifndef MOESAIC_HPP
#define MOESAIC_HPP

#include "moesaic.h"

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace moesaic {

// A call that failed, with its text.
class Error : public std::runtime_error {
public:
  Error(moesaic_status code, const char *text) : std::runtime_error(text), status(code) {}
  moesaic_status status;
};

// Throws unless the status is that of success.
inline void check(moesaic_status status) {
  if (status != MOESAIC_STATUS_OK) throw Error(status, moesaic_last_error());
}

namespace detail {
template <auto Free> struct Deleter {
  template <class T> void operator()(T *handle) const { Free(handle); }
};
template <class T, auto Free> using Handle = std::unique_ptr<T, Deleter<Free>>;

template <class T> struct DtypeOf;
template <> struct DtypeOf<float> { static constexpr moesaic_dtype value = MOESAIC_DTYPE_F32; };
template <> struct DtypeOf<std::int32_t> {
  static constexpr moesaic_dtype value = MOESAIC_DTYPE_I32;
};
template <> struct DtypeOf<std::int64_t> {
  static constexpr moesaic_dtype value = MOESAIC_DTYPE_I64;
};
} // namespace detail

// A tensor of yours: a name, an address, a type, a shape and strides in elements (none: packed). The
// elements must outlive the call; for f16 and bf16 give the type.
class Tensor {
public:
  template <class T>
  Tensor(std::string name, T *data, std::vector<std::int64_t> shape,
         std::vector<std::int64_t> strides = {})
      : Tensor(std::move(name), const_cast<std::remove_const_t<T> *>(data),
               detail::DtypeOf<std::remove_const_t<T>>::value, std::move(shape),
               std::move(strides)) {}
  Tensor(std::string name, void *data, moesaic_dtype dtype, std::vector<std::int64_t> shape,
         std::vector<std::int64_t> strides = {})
      : name_(std::move(name)), data_(data), dtype_(dtype), shape_(std::move(shape)),
        strides_(std::move(strides)) {
    if (!strides_.empty() && strides_.size() != shape_.size())
      throw Error(MOESAIC_STATUS_INVALID, "a tensor has a stride for each size");
  }

  // The tensor as C takes it; valid as long as this one.
  moesaic_tensor c() const {
    return {name_.c_str(),  data_, dtype_, shape_.size(), shape_.data(),
            strides_.empty() ? nullptr : strides_.data()};
  }

private:
  std::string name_;
  void *data_;
  moesaic_dtype dtype_;
  std::vector<std::int64_t> shape_, strides_;
};

using Tensors = std::vector<Tensor>;

namespace detail {
inline std::vector<moesaic_tensor> list(const Tensors &tensors) {
  std::vector<moesaic_tensor> all;
  for (const Tensor &tensor : tensors) all.push_back(tensor.c());
  return all;
}
} // namespace detail

// A device with its compiler and its cache of kernels.
class Engine {
public:
  explicit Engine(const moesaic_engine_options &options = {}) {
    moesaic_engine *made = nullptr;
    check(moesaic_engine_open(&options, &made));
    handle_.reset(made);
  }
  std::string target() const { return moesaic_engine_target(c()); }
  void synchronize() const { check(moesaic_engine_synchronize(c())); }
  const moesaic_engine *c() const { return handle_.get(); }

private:
  detail::Handle<moesaic_engine, moesaic_engine_free> handle_;
};

class Record;

// The description of a layer.
class Spec {
public:
  explicit Spec(const std::string &toml) {
    moesaic_spec *made = nullptr;
    check(moesaic_spec_from_toml(toml.c_str(), &made));
    handle_.reset(made);
  }
  static Spec from_file(const std::string &path) {
    moesaic_spec *made = nullptr;
    check(moesaic_spec_from_file(path.c_str(), &made));
    return Spec(made);
  }
  std::string toml() const { return moesaic_spec_toml(c()); }
  std::vector<moesaic_tensor_info> weights() const {
    std::vector<moesaic_tensor_info> all(moesaic_spec_weight_count(c()));
    for (std::size_t i = 0; i < all.size(); ++i) check(moesaic_spec_weight(c(), i, &all[i]));
    return all;
  }
  const moesaic_spec *c() const { return handle_.get(); }

private:
  friend class Record;
  explicit Spec(moesaic_spec *made) : handle_(made) {}
  detail::Handle<moesaic_spec, moesaic_spec_free> handle_;
};

// One rank's end of a group of ranks.
class World {
public:
  explicit World(moesaic_world *taken) : handle_(taken) {}
  static World mpi(const Engine &engine, const char *library = nullptr, double deadline = 0) {
    moesaic_world *made = nullptr;
    check(moesaic_world_mpi(engine.c(), library, deadline, &made));
    return World(made);
  }
  static std::vector<World> threads(const Engine &engine, std::size_t size, double deadline = 0) {
    std::vector<moesaic_world *> made(size);
    check(moesaic_world_threads(engine.c(), size, deadline, made.data()));
    std::vector<World> worlds;
    for (moesaic_world *world : made) worlds.emplace_back(world);
    return worlds;
  }
  // Ends the group in good order; every rank calls it.
  void finish() { check(moesaic_world_finish(handle_.release())); }
  moesaic_world *c() { return handle_.get(); }

private:
  detail::Handle<moesaic_world, moesaic_world_free> handle_;
};

// A rank's place among those that share layers.
class Mesh {
public:
  Mesh(World &world, const moesaic_parallel &parallel) {
    moesaic_mesh *made = nullptr;
    check(moesaic_mesh_open(world.c(), &parallel, &made));
    handle_.reset(made);
  }
  const moesaic_mesh *c() const { return handle_.get(); }

private:
  detail::Handle<moesaic_mesh, moesaic_mesh_free> handle_;
};

// The state of a forward pass.
class Saved {
public:
  explicit Saved(moesaic_saved *taken) : handle_(taken) {}
  const moesaic_saved *c() const { return handle_.get(); }

private:
  detail::Handle<moesaic_saved, moesaic_saved_free> handle_;
};

// A compiled layer.
class Layer {
public:
  Layer(const Engine &engine, const Spec &spec, const Tensors &weights,
        const moesaic_layer_options &options = {}) {
    moesaic_layer *made = nullptr;
    auto list = detail::list(weights);
    check(moesaic_layer_open(engine.c(), spec.c(), list.data(), list.size(), &options, &made));
    handle_.reset(made);
  }
  static Layer without_weights(const Engine &engine, const Spec &spec) {
    moesaic_layer *made = nullptr;
    check(moesaic_layer_without_weights(engine.c(), spec.c(), &made));
    return Layer(made);
  }
  static Layer from_hf(const Engine &engine, const std::string &folder, std::size_t layer) {
    moesaic_layer *made = nullptr;
    check(moesaic_layer_from_hf(engine.c(), folder.c_str(), layer, &made));
    return Layer(made);
  }
  // A layer with the experts of another, in the same memory.
  static Layer over_experts_of(const Engine &engine, const Layer &bank, const Spec &spec,
                               const Tensors &weights) {
    moesaic_layer *made = nullptr;
    auto list = detail::list(weights);
    check(moesaic_layer_over_experts_of(engine.c(), bank.c(), spec.c(), list.data(), list.size(),
                                        &made));
    return Layer(made);
  }
  Layer handle() const {
    moesaic_layer *made = nullptr;
    check(moesaic_layer_handle(c(), &made));
    return Layer(made);
  }
  void bind(const Tensors &tensors) const {
    auto list = detail::list(tensors);
    check(moesaic_layer_bind(c(), list.data(), list.size()));
  }
  moesaic_tensor_info find(const std::string &name, std::size_t tokens) const {
    moesaic_tensor_info info;
    check(moesaic_layer_find(c(), name.c_str(), tokens, &info));
    return info;
  }
  void forward(std::size_t tokens, const Tensors &tensors, double capacity_factor = 0) const {
    auto list = detail::list(tensors);
    moesaic_call call{tokens, list.data(), list.size(), capacity_factor};
    check(moesaic_forward(c(), &call));
  }
  void route(std::size_t tokens, const Tensors &tensors, double capacity_factor = 0) const {
    auto list = detail::list(tensors);
    moesaic_call call{tokens, list.data(), list.size(), capacity_factor};
    check(moesaic_route(c(), &call));
  }
  Saved forward_train(std::size_t tokens, const Tensors &tensors, const moesaic_rng_key &key = {},
                      double capacity_factor = 0) const {
    auto list = detail::list(tensors);
    moesaic_call call{tokens, list.data(), list.size(), capacity_factor};
    moesaic_saved *made = nullptr;
    check(moesaic_forward_train(c(), &call, &key, &made));
    return Saved(made);
  }
  void backward(const Saved &saved, const Tensors &tensors, bool accumulate = false) const {
    auto list = detail::list(tensors);
    check(moesaic_backward(c(), saved.c(), list.data(), list.size(), accumulate));
  }
  std::vector<float> gradient(const std::string &weight) const {
    auto info = find(weight, 0);
    std::size_t count = 1;
    for (std::size_t i = 0; i < info.dims; ++i) count *= static_cast<std::size_t>(info.shape[i]);
    std::vector<float> values(count);
    check(moesaic_layer_gradient(c(), weight.c_str(), values.data(), count));
    return values;
  }
  void zero_gradients() const { check(moesaic_layer_zero_gradients(c())); }
  void reduce_gradients(bool average = false) const {
    check(moesaic_layer_reduce_gradients(c(), average));
  }
  void set_weight(const Tensor &tensor) const {
    moesaic_tensor one = tensor.c();
    check(moesaic_layer_set_weight(c(), &one));
  }
  void set_strategy(const std::string &strategy) {
    check(moesaic_layer_set_strategy(handle_.get(), strategy.c_str()));
  }
  const moesaic_layer *c() const { return handle_.get(); }

private:
  explicit Layer(moesaic_layer *made) : handle_(made) {}
  detail::Handle<moesaic_layer, moesaic_layer_free> handle_;
};

// The experts that every layer of a model chose for each token.
class Record {
public:
  // [tokens, layers, K], i32.
  explicit Record(const Tensor &routed_experts) {
    moesaic_record *made = nullptr;
    moesaic_tensor one = routed_experts.c();
    check(moesaic_record_open(&one, &made));
    handle_.reset(made);
  }
  static Record read(const std::string &file) {
    moesaic_record *made = nullptr;
    check(moesaic_record_read(file.c_str(), &made));
    return Record(made);
  }
  void write(const std::string &file) const { check(moesaic_record_write(c(), file.c_str())); }
  // The spec of a layer that chooses by the record, and its weight "router.table" [tokens, K].
  Spec replay(const Spec &spec, std::size_t layer, std::vector<std::int32_t> &table) const {
    std::size_t sizes[3];
    check(moesaic_record_sizes(c(), sizes));
    table.resize(sizes[0] * sizes[2]);
    moesaic_spec *made = nullptr;
    check(moesaic_record_replay(c(), spec.c(), layer, table.data(), table.size(), &made));
    return Spec(made);
  }
  const moesaic_record *c() const { return handle_.get(); }

private:
  explicit Record(moesaic_record *made) : handle_(made) {}
  detail::Handle<moesaic_record, moesaic_record_free> handle_;
};

// The state of a training call of several routers.
class MultiSaved {
public:
  explicit MultiSaved(moesaic_multi_saved *taken) : handle_(taken) {}
  const moesaic_multi_saved *c() const { return handle_.get(); }

private:
  detail::Handle<moesaic_multi_saved, moesaic_multi_saved_free> handle_;
};

// Several routers over one set of experts. Results have their number before their other sizes.
class MultiGate {
public:
  MultiGate(const Engine &engine, const Spec &spec, const Tensors &weights,
            const std::vector<Tensors> &routers, const moesaic_layer_options &options = {}) {
    std::vector<std::vector<moesaic_tensor>> lists;
    for (const Tensors &router : routers) lists.push_back(detail::list(router));
    std::vector<moesaic_tensor_list> each;
    for (const auto &list : lists) each.push_back({list.data(), list.size()});
    moesaic_multi_gate *made = nullptr;
    auto own = detail::list(weights);
    check(moesaic_multi_gate_open(engine.c(), spec.c(), own.data(), own.size(), each.data(),
                                  each.size(), &options, &made));
    handle_.reset(made);
  }
  bool in_one_pass() const { return moesaic_multi_gate_in_one_pass(c()) != 0; }
  void forward(std::size_t tokens, const Tensors &tensors, double capacity_factor = 0) const {
    auto list = detail::list(tensors);
    moesaic_call call{tokens, list.data(), list.size(), capacity_factor};
    check(moesaic_multi_gate_forward(c(), &call));
  }
  MultiSaved forward_train(std::size_t tokens, const Tensors &tensors,
                           const moesaic_rng_key &key = {}, double capacity_factor = 0) const {
    auto list = detail::list(tensors);
    moesaic_call call{tokens, list.data(), list.size(), capacity_factor};
    moesaic_multi_saved *made = nullptr;
    check(moesaic_multi_gate_forward_train(c(), &call, &key, &made));
    return MultiSaved(made);
  }
  void backward(const MultiSaved &saved, const Tensors &tensors, bool accumulate = false) const {
    auto list = detail::list(tensors);
    check(moesaic_multi_gate_backward(c(), saved.c(), list.data(), list.size(), accumulate));
  }
  void gradient(std::size_t gate, const std::string &weight, std::vector<float> &values) const {
    check(moesaic_multi_gate_gradient(c(), gate, weight.c_str(), values.data(), values.size()));
  }
  void set_weight(std::size_t gate, const Tensor &tensor) const {
    moesaic_tensor one = tensor.c();
    check(moesaic_multi_gate_set_weight(c(), gate, &one));
  }
  void reduce_gradients(bool average = false) const {
    check(moesaic_multi_gate_reduce_gradients(c(), average));
  }
  const moesaic_multi_gate *c() const { return handle_.get(); }

private:
  detail::Handle<moesaic_multi_gate, moesaic_multi_gate_free> handle_;
};

} // namespace moesaic

#endif
