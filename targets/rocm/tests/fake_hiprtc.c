// A stand-in for libhiprtc: "compiling" copies the file CODE_OBJECT, after it
// has looked at text and options.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char log_text[4096], name_text[256];
static char *source;

// As in every ROCm.
int hiprtcVersion(int *major, int *minor) {
  *major = 9;
  *minor = 0;
  return 0;
}
int hiprtcCreateProgram(void **program, const char *text, const char *name, int n, const char **h, const char **i) {
  puts("chatter of a run time");
  source = strdup(text);
  strcpy(name_text, name);
  *program = source;
  return 0;
}
// What is optimized is told only what stands behind an "-mllvm" of its own.
static int unrolls(int count, const char **options) {
  for (int i = 1; i < count; i++)
    if (!strcmp(options[i - 1], "-mllvm") && !strncmp(options[i], "-pragma-unroll-threshold=", 25)) return 1;
  return 0;
}
int hiprtcCompileProgram(void *program, int count, const char **options) {
  for (int i = 0; i < count; i++)
    if (!strcmp(options[i], "--offload-arch=gfx1100")) abort();
  if (count < 6 || !unrolls(count, options)) return 5;
  if (strcmp(options[0], "--offload-arch=gfx942") && strcmp(options[0], "--offload-arch=gfx90a")) return 5;
  if (strstr(source, "nope")) {
    snprintf(log_text, sizeof log_text, "%s:2: error: nope", name_text);
    return 6;
  }
  while (strstr(source, "forever")) ;
  return 0;
}
int hiprtcGetProgramLogSize(void *program, size_t *bytes) { *bytes = strlen(log_text) + 1; return 0; }
int hiprtcGetProgramLog(void *program, char *log) { strcpy(log, log_text); return 0; }
static size_t code(char *to) {
  FILE *file = fopen(getenv("CODE_OBJECT"), "rb");
  static char bytes[1 << 20];
  size_t length = fread(bytes, 1, sizeof bytes, file);
  fclose(file);
  if (to) memcpy(to, bytes, length);
  return length;
}
int hiprtcGetCodeSize(void *program, size_t *bytes) { *bytes = code(0); return 0; }
int hiprtcGetCode(void *program, char *to) { code(to); return 0; }
