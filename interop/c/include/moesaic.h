/* moesaic: Mixture-of-Experts layers, compiled for your CPU or GPU.
 *
 * An *engine* is a device with its compiler and its cache of kernels. A *spec* describes a layer. A
 * *layer* is compiled from a spec and has weights. A *tensor* is a name with an address, a type and
 * a shape. docs/C.md in moesaic's source has a walk through all of it.
 *
 * Errors. A function that can fail returns a moesaic_status; moesaic_last_error() has the text, per
 * thread. `out` is NULL after a failure. No failure and no panic ends your process.
 *
 * Ownership. You free every handle that a function writes to `out`, by the function named there.
 * Tensors, texts and structures that you pass are read during the call and never kept, unless the
 * function says so.
 *
 * Threads. You may use a handle in any thread. Several threads may use one engine, spec or layer at
 * the same time; calls of one layer take turns, those of moesaic_layer_handle run together. Not at
 * the same time as anything else on the same handle: moesaic_layer_set_strategy, all of a world or
 * mesh, and every function that frees. A child of fork opens an engine of its own and uses nothing
 * of its parent's.
 *
 * Structures of options are to be zeroed before you set a field, so that later fields have their
 * defaults. The interface may change from 0.1 to 0.2; the shared library's name changes then.
 */

#ifndef MOESAIC_H
#define MOESAIC_H

/* Made of interop/c/src by cbindgen: do not edit, see cbindgen.toml. */

#include <stddef.h>
#include <stdint.h>

// The most sizes of a tensor.
#define MOESAIC_MAX_DIMS 8

// The outcome of a call.
typedef enum moesaic_status {
  // The call succeeded.
  MOESAIC_STATUS_OK = 0,
  // An argument, a spec or a tensor is not as it must be. Nothing was computed.
  MOESAIC_STATUS_INVALID = 1,
  // A device, a compiler, a library, a file or a kernel is missing.
  MOESAIC_STATUS_UNAVAILABLE = 2,
  // The device, its memory or an exchange between ranks failed.
  MOESAIC_STATUS_FAILED = 3,
  // A defect of moesaic; please report the text. Handles of the call stay valid.
  MOESAIC_STATUS_DEFECT = 4,
} moesaic_status;

// The type of a tensor's elements.
typedef enum moesaic_dtype {
  // IEEE binary32.
  MOESAIC_DTYPE_F32 = 0,
  // IEEE binary16.
  MOESAIC_DTYPE_F16 = 1,
  // The upper half of a binary32.
  MOESAIC_DTYPE_BF16 = 2,
  // Signed, 32 bits.
  MOESAIC_DTYPE_I32 = 3,
  // Signed, 64 bits.
  MOESAIC_DTYPE_I64 = 4,
} moesaic_dtype;

// The owner of a tensor, and its readers.
typedef enum moesaic_role {
  // You give it at every call: "x", and what the spec's router reads.
  MOESAIC_ROLE_INPUT = 0,
  // You give it once, or bind it.
  MOESAIC_ROLE_WEIGHT = 1,
  // A call writes it if you name it: "y", "topk_ids", "topk_weights", "counts".
  MOESAIC_ROLE_OUTPUT = 2,
  // You give it at every backward pass: "dy".
  MOESAIC_ROLE_OUTPUT_GRADIENT = 3,
  // Backward writes it if you name it: "dx", "grad.topk_weights".
  MOESAIC_ROLE_INPUT_GRADIENT = 4,
  // Backward writes it: "grad." and the name of a weight.
  MOESAIC_ROLE_WEIGHT_GRADIENT = 5,
} moesaic_role;

// The memory that training may use: what is not kept, backward computes again, to the same bits.
typedef enum moesaic_keep {
  // Keep all that backward reads.
  MOESAIC_KEEP_ALL = 0,
  // Compute the hidden values of experts again.
  MOESAIC_KEEP_NO_HIDDEN = 1,
  // Compute the routing again, too.
  MOESAIC_KEEP_INPUTS = 2,
} moesaic_keep;

// A device with its compiler and its cache of kernels. Layers keep what they need of it, so you
// may free it before them.
typedef struct moesaic_engine moesaic_engine;

// A compiled layer, or one rank's part of a layer over ranks. Calls of several threads take turns.
typedef struct moesaic_layer moesaic_layer;

// A rank's place among those that share layers.
typedef struct moesaic_mesh moesaic_mesh;

// Layers that differ in their routers and share experts, in one memory. A call runs all of them on
// the same tokens, in one pass over the experts where moesaic_multi_gate_in_one_pass says so.
typedef struct moesaic_multi_gate moesaic_multi_gate;

// The state that a training call of a moesaic_multi_gate keeps for backward.
typedef struct moesaic_multi_saved moesaic_multi_saved;

// The experts that every layer of a model chose for each token.
typedef struct moesaic_record moesaic_record;

// The state that a training call keeps for backward.
typedef struct moesaic_saved moesaic_saved;

// The description of a layer.
typedef struct moesaic_spec moesaic_spec;

// One rank's end of a group of ranks. One thread uses it at a time.
typedef struct moesaic_world moesaic_world;

// The choices that open an engine. All zero is the default.
typedef struct moesaic_engine_options {
  // "auto", "cpu", "cuda", "rocm", or a name with an architecture, such as "cpu:avx2" or
  // "cuda:sm_90a". NULL is "auto". Targets of GPUs need a library that was built for them.
  const char *target;
  // The directory that keeps compiled kernels, which is made where it is missing. NULL is your
  // cache directory, "" keeps none.
  const char *cache;
  // The number of CPU threads, the caller included. 0 is one per core, shared by all such
  // engines of the process, which end with the process.
  size_t threads;
  // The number of the GPU, as its driver counts; 0 for a CPU. "auto" may find a CPU, which has
  // no number.
  size_t device;
  // Not 0: never compile, so a kernel that the cache lacks is an error.
  int strict;
  // A stream of yours on the GPU, a CUstream or hipStream_t, for the targets "cuda" and "rocm":
  // calls run in its order. It must live as long as the engine and its layers, and nobody may
  // capture it during a call. CU_STREAM_LEGACY is CUDA's default stream. NULL: the engine makes a
  // stream of its own.
  void *stream;
} moesaic_engine_options;

// A tensor that a spec or a layer has.
typedef struct moesaic_tensor_info {
  // The canonical name. Valid as long as the spec or the layer.
  const char *name;
  // The type of the elements.
  enum moesaic_dtype dtype;
  // The owner.
  enum moesaic_role role;
  // The number of sizes.
  size_t dims;
  // The sizes, outermost first; those after `dims` are 0.
  int64_t shape[MOESAIC_MAX_DIMS];
} moesaic_tensor_info;

// The sizes of a mesh. `ep * expert_tp * dp` is the number of ranks; 0 stands for 1.
typedef struct moesaic_parallel {
  // The number of groups that share the experts.
  size_t ep;
  // The number of tensor-parallel shards of an expert.
  size_t expert_tp;
  // The number of groups that hold all experts.
  size_t dp;
  // Not 0: shared experts are sharded as the others are; 0: each rank has them whole.
  int shard_shared;
  // Not 0: losses, capacities and selections see the tokens of all ranks; 0: the rank's own.
  int world_scope;
  // The experts of each group, as "0-2 | 3-5,+2"; NULL is equal contiguous parts.
  const char *placement;
} moesaic_parallel;

// A tensor in memory of the caller's. The library copies the structure, never keeps it.
typedef struct moesaic_tensor {
  // The canonical name, such as "x", "y" or "experts.up.weight".
  const char *name;
  // The first element: on the host for weights and for layers on a CPU, on the device for calls
  // of layers on a GPU. An input is only read, but for "topk_weights" of a spec with
  // `renormalize_after_drop`.
  void *data;
  // A moesaic_dtype.
  int dtype;
  // The number of sizes.
  size_t dims;
  // The sizes, outermost first.
  const int64_t *shape;
  // The distance of neighbours along each dimension, in elements. NULL: packed, row-major. Others
  // cost a copy, on a GPU they are refused.
  const int64_t *strides;
} moesaic_tensor;

// The choices of a layer. All zero is a layer of one process for inference.
typedef struct moesaic_layer_options {
  // Not 0: the layer can run moesaic_forward_train and moesaic_backward.
  int training;
  // A moesaic_keep, for training.
  int keep;
  // The ranks that share the layer; NULL is one process. All ranks of the mesh make the layer
  // and every call, in the same order.
  const struct moesaic_mesh *mesh;
  // Not 0: `weights` are this rank's part: its own experts alone, by the same names.
  int weights_are_part;
} moesaic_layer_options;

// A call. Tensors are on the layer's device: host memory for a CPU.
typedef struct moesaic_call {
  // The number of tokens T; 0 is allowed.
  size_t tokens;
  // Inputs, "x" [T, model_dim] at least, and the outputs that you want, such as "y"
  // [T, output_dim] in the spec's activation type, "topk_ids" [T, K] i32, "topk_weights" [T, K]
  // f32, "counts" [E] i64. moesaic_layer_tensor lists them. A result has memory of its own.
  const struct moesaic_tensor *tensors;
  // The number of tensors.
  size_t tensor_count;
  // The capacity factor of this call; 0 is the spec's.
  double capacity_factor;
} moesaic_call;

// The position of a training call. All random numbers follow from it.
typedef struct moesaic_rng_key {
  // The seed of the run.
  uint64_t seed;
  // The optimizer step, or micro-batch.
  uint64_t step;
  // The layer in its model.
  uint64_t layer;
  // The number of this call's first token in the whole batch; on a mesh that of the first rank.
  uint64_t first_token;
} moesaic_rng_key;

// The tensors of one router.
typedef struct moesaic_tensor_list {
  // The tensors.
  const struct moesaic_tensor *tensors;
  // The number of tensors.
  size_t count;
} moesaic_tensor_list;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Returns the text of this thread's last failed call, in UTF-8: empty if none has failed. A call
// that succeeds leaves it. Valid until the next failure in this thread; never NULL.
const char *moesaic_last_error(void);

// Returns the version of the library, such as "0.1.0". Static.
const char *moesaic_version(void);

// Opens an engine. `options` may be NULL. Free it by moesaic_engine_free.
enum moesaic_status moesaic_engine_open(const struct moesaic_engine_options *options,
                                        struct moesaic_engine **out);

// Returns the target of an engine's kernels, such as "cpu:avx512". Valid as long as the engine;
// NULL for NULL.
const char *moesaic_engine_target(const struct moesaic_engine *engine);

// Waits until the device has done all that was launched. On a CPU every call is over when it
// returns.
enum moesaic_status moesaic_engine_synchronize(const struct moesaic_engine *engine);

// Frees an engine; NULL is allowed.
void moesaic_engine_free(struct moesaic_engine *engine);

// Reads a spec in TOML; docs/SPEC.md has the keys. The error shows the mistakes in the text. Free
// it by moesaic_spec_free.
enum moesaic_status moesaic_spec_from_toml(const char *toml, struct moesaic_spec **out);

// Reads a file with a spec in TOML, as moesaic_spec_from_toml.
enum moesaic_status moesaic_spec_from_file(const char *path, struct moesaic_spec **out);

// Makes the spec of a layer of a model from a config.json of transformers, given by its path.
// Layers count from zero.
enum moesaic_status moesaic_spec_from_config(const char *path,
                                             size_t layer,
                                             struct moesaic_spec **out);

// Returns the canonical TOML of a spec, equal for equal layers. Valid as long as the spec; NULL
// for NULL.
const char *moesaic_spec_toml(const struct moesaic_spec *spec);

// Returns the number of weights of a spec; 0 for NULL.
size_t moesaic_spec_weight_count(const struct moesaic_spec *spec);

// Writes name, type and shape of a weight of the whole layer, by its number.
enum moesaic_status moesaic_spec_weight(const struct moesaic_spec *spec,
                                        size_t number,
                                        struct moesaic_tensor_info *out);

// Frees a spec; NULL is allowed.
void moesaic_spec_free(struct moesaic_spec *spec);

// Makes the ranks of a group of `size` threads of this process: writes `size` handles to `worlds`,
// one for each thread. `deadline` is in seconds, of each exchange; 0 is a minute.
enum moesaic_status moesaic_world_threads(const struct moesaic_engine *engine,
                                          size_t size,
                                          double deadline,
                                          struct moesaic_world **worlds);

// Joins the ranks that `mpirun` or `srun` has started: each is a process. Call it once per
// process, before other threads use MPI. `library` is the path of the MPI library; NULL searches.
// `deadline` is in seconds, for the start and for each exchange; 0 is MOESAIC_DEADLINE, else a
// minute.
enum moesaic_status moesaic_world_mpi(const struct moesaic_engine *engine,
                                      const char *library,
                                      double deadline,
                                      struct moesaic_world **out);

// Joins the ranks that a launcher has started, with one GPU each, over NCCL or RCCL. `library` is
// the path of the library; NULL searches. `deadline` as for moesaic_world_mpi.
enum moesaic_status moesaic_world_nccl(const struct moesaic_engine *engine,
                                       const char *library,
                                       double deadline,
                                       struct moesaic_world **out);

// Writes this rank's number and the number of ranks.
enum moesaic_status moesaic_world_rank(const struct moesaic_world *world,
                                       size_t *rank,
                                       size_t *size);

// Ends a group in good order and frees this rank's end, also where it fails. All ranks call it,
// after they have freed their layers and meshes.
enum moesaic_status moesaic_world_finish(struct moesaic_world *world);

// Leaves a group at once, so that operations of the others fail; NULL is allowed. For a rank that
// cannot go on; moesaic_world_finish is the good end.
void moesaic_world_free(struct moesaic_world *world);

// Makes the groups of a mesh. All ranks call it with the same sizes. Layers are made on it by
// moesaic_layer_open, with the engine of the world. Free it by moesaic_mesh_free.
enum moesaic_status moesaic_mesh_open(struct moesaic_world *world,
                                      const struct moesaic_parallel *parallel,
                                      struct moesaic_mesh **out);

// Frees a mesh; NULL is allowed. Layers made on it stay.
void moesaic_mesh_free(struct moesaic_mesh *mesh);

// Makes a layer and copies its weights, which you may free afterwards. Compiles what the engine's
// cache lacks.
//
// `weights` are those of the spec (moesaic_spec_weight), of the whole layer, in host memory.
// `options` may be NULL. Free the layer by moesaic_layer_free.
enum moesaic_status moesaic_layer_open(const struct moesaic_engine *engine,
                                       const struct moesaic_spec *spec,
                                       const struct moesaic_tensor *weights,
                                       size_t count,
                                       const struct moesaic_layer_options *options,
                                       struct moesaic_layer **out);

// Makes a layer of one process that copies no weights: you bind the address of each
// (moesaic_layer_bind), and calls read them there. It can train. Free it by moesaic_layer_free.
enum moesaic_status moesaic_layer_without_weights(const struct moesaic_engine *engine,
                                                  const struct moesaic_spec *spec,
                                                  struct moesaic_layer **out);

// Binds weights, and the gradients "grad.<weight>" that backward writes: packed tensors on the
// layer's device, of the types that moesaic_layer_tensor lists. They must stay valid as long as
// calls and backward passes use them; weights must not change between a forward pass and its
// backward. A name that is bound already is replaced.
enum moesaic_status moesaic_layer_bind(const struct moesaic_layer *layer,
                                       const struct moesaic_tensor *tensors,
                                       size_t count);

// Makes the layer of a model for inference from its folder in the form of transformers: the spec
// from config.json, the weights from the safetensors files beside it. Layers count from zero. On a
// CPU quantized experts stay the codes of the files. "x" and "y" have the model's type, mostly
// bf16; moesaic_layer_find tells it.
enum moesaic_status moesaic_layer_from_hf(const struct moesaic_engine *engine,
                                          const char *folder,
                                          size_t layer,
                                          struct moesaic_layer **out);

// Makes the layer of a model for inference from a GGUF file, as moesaic_layer_from_hf.
enum moesaic_status moesaic_layer_from_gguf(const struct moesaic_engine *engine,
                                            const char *file,
                                            size_t layer,
                                            struct moesaic_layer **out);

// Makes another layer with the same weights and kernels, and a workspace of its own, so that two
// threads call at the same time. Over ranks every rank makes it. A layer without weights has none.
enum moesaic_status moesaic_layer_handle(const struct moesaic_layer *layer,
                                         struct moesaic_layer **out);

// Copies the spec of a layer. Free it by moesaic_spec_free.
enum moesaic_status moesaic_layer_spec(const struct moesaic_layer *layer,
                                       struct moesaic_spec **out);

// Returns the number of tensors that you may name: those of calls, and weights with their
// gradients, on a mesh this rank's. 0 for NULL.
size_t moesaic_layer_tensor_count(const struct moesaic_layer *layer);

// Writes name, type, owner and shape of a tensor by its number, for a call of `tokens` tokens.
enum moesaic_status moesaic_layer_tensor(const struct moesaic_layer *layer,
                                         size_t number,
                                         size_t tokens,
                                         struct moesaic_tensor_info *out);

// As moesaic_layer_tensor, by name.
enum moesaic_status moesaic_layer_find(const struct moesaic_layer *layer,
                                       const char *name,
                                       size_t tokens,
                                       struct moesaic_tensor_info *out);

// Replaces a weight, on a mesh this rank's part of it, by a copy of a tensor in host memory. Waits
// for the calls of all handles.
enum moesaic_status moesaic_layer_set_weight(const struct moesaic_layer *layer,
                                             const struct moesaic_tensor *tensor);

// Copies the gradient of a weight, as f32, to `count` elements of host memory, which must be as
// many as the weight has. `name` is that of the weight. On a mesh it is this rank's part.
enum moesaic_status moesaic_layer_gradient(const struct moesaic_layer *layer,
                                           const char *name,
                                           float *data,
                                           size_t count);

// Makes all gradients of a training layer zero, where backward passes only add.
enum moesaic_status moesaic_layer_zero_gradients(const struct moesaic_layer *layer);

// Sums gradients over the ranks that hold the same weights, and with `average` not 0 divides by
// the number of ranks. Does nothing without ranks. Call it after the last backward of a step.
enum moesaic_status moesaic_layer_reduce_gradients(const struct moesaic_layer *layer, int average);

// Sets the strategy of the following calls of a layer over ranks, in the words of
// docs/DISTRIBUTED.md: "r=2,overlap_degree=4,all_to_all=2dh". Results stay the same up to the
// rounding of sums. All ranks pass the same text.
enum moesaic_status moesaic_layer_set_strategy(struct moesaic_layer *layer, const char *strategy);

// Frees a layer; NULL is allowed. States of its forward passes may be freed before or after.
void moesaic_layer_free(struct moesaic_layer *layer);

// Evaluates a layer. On a CPU it is done when this returns; on a GPU it is launched, and memory of
// the call must stay until moesaic_engine_synchronize.
enum moesaic_status moesaic_forward(const struct moesaic_layer *layer,
                                    const struct moesaic_call *call);

// Routes as moesaic_forward does and stops there. Name the parts of the record that you want:
// "topk_ids", "topk_weights", "counts", "locations", "offsets", and with a capacity "capacity" and
// "overflow".
enum moesaic_status moesaic_route(const struct moesaic_layer *layer,
                                  const struct moesaic_call *call);

// Runs a training call, with noise, dropout and losses where the spec has them, and keeps the
// state for moesaic_backward in `out`. Free it by moesaic_saved_free. `key` may be NULL for zeros.
// Packed inputs must stay valid and unchanged until the last backward of the state; of strided
// ones the state keeps a copy.
enum moesaic_status moesaic_forward_train(const struct moesaic_layer *layer,
                                          const struct moesaic_call *call,
                                          const struct moesaic_rng_key *key,
                                          struct moesaic_saved **out);

// Runs backward of a training call. `tensors` has "dy" [T, output_dim], in the spec's activation
// type, and the results that you want: "dx" [T, model_dim] of the same type, "grad.topk_weights"
// [T, K] f32. Gradients of weights are f32, those of experts' matrices of the spec's
// `expert_gradients`: the layer keeps them (moesaic_layer_gradient), or writes them where they are
// bound. They are overwritten, or with `accumulate` not 0 added to. A state may run backward
// several times.
enum moesaic_status moesaic_backward(const struct moesaic_layer *layer,
                                     const struct moesaic_saved *saved,
                                     const struct moesaic_tensor *tensors,
                                     size_t count,
                                     int accumulate);

// Frees a state; NULL is allowed.
void moesaic_saved_free(struct moesaic_saved *saved);

// Makes a layer whose routed experts are those of `bank`, in the same memory. Router, projections
// and shared experts are the layer's own, copied from `weights`, host memory without the experts.
// The spec may differ in all but the experts. The layer trains if `bank` does, and has its mesh,
// all of whose ranks make it. `bank` has weights of its own, and may be freed before the layer.
//
// The experts of both have one gradient: begin a step with moesaic_layer_zero_gradients of each,
// and let every backward pass add. Over ranks reduce the gradients of `bank` last. Free the layer
// by moesaic_layer_free.
enum moesaic_status moesaic_layer_over_experts_of(const struct moesaic_engine *engine,
                                                  const struct moesaic_layer *bank,
                                                  const struct moesaic_spec *spec,
                                                  const struct moesaic_tensor *weights,
                                                  size_t count,
                                                  struct moesaic_layer **out);

// Makes one layer per element of `routers`, the weights whose names begin with "router."; all
// others are in `weights`, once for all. Host memory, which is copied. `options` may be NULL; over
// ranks all of them call it with as many routers. Free it by moesaic_multi_gate_free.
enum moesaic_status moesaic_multi_gate_open(const struct moesaic_engine *engine,
                                            const struct moesaic_spec *spec,
                                            const struct moesaic_tensor *weights,
                                            size_t count,
                                            const struct moesaic_tensor_list *routers,
                                            size_t router_count,
                                            const struct moesaic_layer_options *options,
                                            struct moesaic_multi_gate **out);

// Returns 1 if a call runs all layers in one pass over the experts, else 0. They run one by one if
// experts have a capacity, if the caller routes, over ranks, and for one router.
int moesaic_multi_gate_in_one_pass(const struct moesaic_multi_gate *gates);

// Evaluates every layer on the same tokens. Tensors are in host memory on any device: inputs as
// those of moesaic_forward, and outputs with the number G of routers before the sizes that they
// have there, such as "y" [G, T, output_dim] or "topk_ids" [G, T, K].
//
// With the input "router_ids" [T] i32 each token runs by the router of that number alone, such as
// one for each modality, and outputs have the sizes that they have for moesaic_forward. "counts"
// then are sums over the routers.
enum moesaic_status moesaic_multi_gate_forward(const struct moesaic_multi_gate *gates,
                                               const struct moesaic_call *call);

// Runs a training call of every layer on the same tokens, as moesaic_multi_gate_forward, and keeps
// the state for moesaic_multi_gate_backward in `out`. `key` may be NULL for zeros; layers with one
// key draw the same numbers. Free the state by moesaic_multi_saved_free.
enum moesaic_status moesaic_multi_gate_forward_train(const struct moesaic_multi_gate *gates,
                                                     const struct moesaic_call *call,
                                                     const struct moesaic_rng_key *key,
                                                     struct moesaic_multi_saved **out);

// Runs backward of a training call, of every layer. `tensors` are in host memory: "dy" [G, T,
// output_dim], and the results that you want, "dx" [G, T, model_dim] and "grad.topk_weights" [G,
// T, K], the part of each router: the gradient of x is their sum. After a call with "router_ids"
// they have no G. Gradients of weights stay in the layers (moesaic_multi_gate_gradient), those of
// experts summed over the routers. They are overwritten, or with `accumulate` not 0 added to.
enum moesaic_status moesaic_multi_gate_backward(const struct moesaic_multi_gate *gates,
                                                const struct moesaic_multi_saved *saved,
                                                const struct moesaic_tensor *tensors,
                                                size_t count,
                                                int accumulate);

// Copies the gradient of a weight, as f32, to `count` elements of host memory: of router `gate` for
// a name that begins with "router.", else of all. Routers count from zero.
enum moesaic_status moesaic_multi_gate_gradient(const struct moesaic_multi_gate *gates,
                                                size_t gate,
                                                const char *name,
                                                float *data,
                                                size_t count);

// Replaces a weight by a copy of a tensor in host memory: of router `gate` for a name that begins
// with "router.", else of all.
enum moesaic_status moesaic_multi_gate_set_weight(const struct moesaic_multi_gate *gates,
                                                  size_t gate,
                                                  const struct moesaic_tensor *tensor);

// Sums gradients over the ranks that hold the same weights, those of experts once, and with
// `average` not 0 divides by the number of ranks. Does nothing without ranks.
enum moesaic_status moesaic_multi_gate_reduce_gradients(const struct moesaic_multi_gate *gates,
                                                        int average);

// Frees the layers; NULL is allowed. States of their calls may be freed before or after.
void moesaic_multi_gate_free(struct moesaic_multi_gate *gates);

// Frees a state; NULL is allowed.
void moesaic_multi_saved_free(struct moesaic_multi_saved *saved);

// Makes a record of "routed_experts" [tokens, layers, K], i32, in host memory, which is copied.
// Calls write one where you want it: in each layer name "topk_ids" at `layer * K` elements into the
// array, with the strides {layers * K, 1}. Free it by moesaic_record_free.
enum moesaic_status moesaic_record_open(const struct moesaic_tensor *routed_experts,
                                        struct moesaic_record **out);

// Reads a record from an .npy file, as vLLM sends and NumPy saves it. Free it by
// moesaic_record_free.
enum moesaic_status moesaic_record_read(const char *file, struct moesaic_record **out);

// Writes a record as an .npy file, of the smallest integers that hold its ids.
enum moesaic_status moesaic_record_write(const struct moesaic_record *record, const char *file);

// Writes the sizes of a record: `sizes` has room for tokens, layers and K.
enum moesaic_status moesaic_record_sizes(const struct moesaic_record *record, size_t *sizes);

// Makes the spec of a layer that takes its experts from layer `layer` of a record, and writes the
// weight "router.table" [tokens, K] that it then has to `count` elements at `table`. All other
// weights are those of `spec`. Calls of such a layer take "token_ids" [T] i32, rows of the record;
// weights of the experts, and the gradients of the router, follow from its own logits. Free the spec
// by moesaic_spec_free.
enum moesaic_status moesaic_record_replay(const struct moesaic_record *record,
                                          const struct moesaic_spec *spec,
                                          size_t layer,
                                          int32_t *table,
                                          size_t count,
                                          struct moesaic_spec **out);

// Frees a record; NULL is allowed.
void moesaic_record_free(struct moesaic_record *record);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* MOESAIC_H */
