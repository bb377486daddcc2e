// What the examples in C share: values, a check of statuses, and results as bits.
#ifndef COMMON_H
#define COMMON_H

#include <moesaic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Ends the program with the library's text if a call has failed.
static void check(moesaic_status status) {
  if (status == MOESAIC_STATUS_OK) return;
  fprintf(stderr, "moesaic: %s\n", moesaic_last_error());
  exit(1);
}

// Values that every language makes alike: multiples of 1/64 between -1/2 and 1/2.
static float *wave(size_t count, size_t salt) {
  float *values = malloc((count + !count) * sizeof *values);
  if (!values) exit(1);
  for (size_t i = 0; i < count; ++i)
    values[i] = (float)((long)((i * 37 + salt * 11) % 64) - 32) / 64.0f;
  return values;
}

// Makes a packed tensor of f32; `shape` must live as long as it.
static moesaic_tensor f32(const char *name, float *data, size_t dims, const int64_t *shape) {
  moesaic_tensor tensor = {0};
  tensor.name = name;
  tensor.data = data;
  tensor.dtype = MOESAIC_DTYPE_F32;
  tensor.dims = dims;
  tensor.shape = shape;
  return tensor;
}

// Prints values as the bits that they are, to be compared.
static void print_bits(FILE *to, const char *name, const float *values, size_t count) {
  fprintf(to, "%s", name);
  for (size_t i = 0; i < count; ++i) {
    unsigned bits;
    memcpy(&bits, &values[i], sizeof bits);
    fprintf(to, " %08x", bits);
  }
  fprintf(to, "\n");
}

// Waves as the weights of a spec, in memory of the caller's.
typedef struct {
  size_t count;
  moesaic_tensor_info *infos;
  moesaic_tensor *tensors;
} weights;

static inline weights make_weights(const moesaic_spec *spec) {
  weights made = {moesaic_spec_weight_count(spec), NULL, NULL};
  made.infos = calloc(made.count, sizeof *made.infos);
  made.tensors = calloc(made.count, sizeof *made.tensors);
  if (!made.infos || !made.tensors) exit(1);
  for (size_t i = 0; i < made.count; ++i) {
    moesaic_tensor_info *info = &made.infos[i];
    check(moesaic_spec_weight(spec, i, info));
    size_t elements = 1;
    for (size_t d = 0; d < info->dims; ++d) elements *= (size_t)info->shape[d];
    made.tensors[i] = f32(info->name, wave(elements, i + 1), info->dims, info->shape);
  }
  return made;
}

static inline void free_weights(weights made) {
  for (size_t i = 0; i < made.count; ++i) free(made.tensors[i].data);
  free(made.tensors);
  free(made.infos);
}

#endif
