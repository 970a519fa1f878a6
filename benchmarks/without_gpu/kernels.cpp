// Kernels of libraries: their names as registered, and the limits of a launch.
#include "device.h"

#define RT EXPORTED cudaError_t
static std::unordered_map<const void*, const char*>& names() {
  static auto* kept = new std::unordered_map<const void*, const char*>;
  return *kept;
}
EXPORTED void** __cudaRegisterFatBinary(void* p) {
  void** h = (void**)malloc(64);
  return h;
}
EXPORTED void __cudaRegisterFatBinaryEnd(void**) {}
EXPORTED void __cudaUnregisterFatBinary(void**) {}
EXPORTED void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
EXPORTED char __cudaInitModule(void**) { return 1; }
EXPORTED void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*,
                                     dim3*, int*) {
  LOCK;
  names()[host] = name;
}
static const char* name_of(const void* f) {
  LOCK;
  auto i = names().find(f);
  return i == names().end() ? "?" : i->second;
}
struct Cfg {
  dim3 g, b;
  size_t sh;
  void* st;
};
static thread_local std::vector<Cfg>* cfgs = nullptr;
EXPORTED unsigned __cudaPushCallConfiguration(dim3 g, dim3 b, size_t sh, CUstream_st* st) {
  if (!cfgs) cfgs = new std::vector<Cfg>;
  cfgs->push_back({g, b, sh, st});
  return 0;
}
RT __cudaPopCallConfiguration(dim3* g, dim3* b, size_t* sh, void* st) {
  Cfg c = cfgs->back();
  cfgs->pop_back();
  *g = c.g;
  *b = c.b;
  *sh = c.sh;
  *(void**)st = c.st;
  return cudaSuccess;
}
RT __cudaGetKernel(cudaKernel_t* k, const void* f) {
  *k = (cudaKernel_t)f;
  return cudaSuccess;
}
static cudaError_t launch(const void* f, dim3 g, dim3 b, size_t sh, void* st) {
  record('K', name_of(f), sh, st);
  if (sh > MOST_SHARED || g.y > MOST_BLOCKS || g.z > MOST_BLOCKS || (size_t)b.x * b.y * b.z > 1024) {
    fprintf(stderr, "without_gpu: bad launch %s\n", name_of(f));
    return cudaErrorInvalidValue;
  }
  return cudaSuccess;
}
RT __cudaLaunchKernel(cudaKernel_t k, dim3 g, dim3 b, void**, size_t sh, cudaStream_t st) {
  return launch((const void*)k, g, b, sh, st);
}
RT cudaLaunchKernel(const void* f, dim3 g, dim3 b, void**, size_t sh, cudaStream_t st) {
  return launch(f, g, b, sh, st);
}
RT cudaLaunchCooperativeKernel(const void* f, dim3 g, dim3 b, void**, size_t sh, cudaStream_t st) {
  return launch(f, g, b, sh, st);
}
RT cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* f, void**) {
  return launch(f, c->gridDim, c->blockDim, c->dynamicSmemBytes, c->stream);
}
RT cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
RT cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024;
  a->numRegs = 64;
  a->binaryVersion = 90;
  a->ptxVersion = 90;
  a->maxDynamicSharedSizeBytes = MOST_SHARED;
  return cudaSuccess;
}
RT cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void*, int, size_t, unsigned) {
  *n = 2;
  return cudaSuccess;
}
RT cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void*, int, size_t) {
  *n = 2;
  return cudaSuccess;
}
RT cudaGetDriverEntryPointByVersion(const char* s, void** f, unsigned, unsigned long long,
                                    cudaDriverEntryPointQueryResult* r) {
  std::string n = s;
  *f = nullptr;
  for (const char* suffix : {"", "_v2", "_v3"})
    if (!*f) *f = dlsym(RTLD_DEFAULT, (n + suffix).c_str());
  if (!*f) fprintf(stderr, "without_gpu: no driver entry %s\n", s);
  if (r) *r = *f ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return *f ? cudaSuccess : cudaErrorInvalidValue;
}
