// CUDA's driver, which Triton and expandable segments call.
#include <elf.h>

#include "device.h"

int attribute(int a) {
  switch (a) {
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: return 64;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: return 2147483647;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: return MOST_BLOCKS;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: return 49152;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: return MOST_SHARED;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: return 233472;
    case CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK: return 1024;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: return 32;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: return 65536;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: return 1980000;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: return 3201000;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: return 6144;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: return 132;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: return 62914560;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: return 2048;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR: return 32;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return 9;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: return 0;
    case CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED: return 0;
    case CU_DEVICE_ATTRIBUTE_INTEGRATED:
    case CU_DEVICE_ATTRIBUTE_COMPUTE_MODE: return 0;
    default: return 1;
  }
}
#define DR EXPORTED CUresult
DR cuInit(unsigned) { return CUDA_SUCCESS; }
DR cuDeviceGet(CUdevice* d, int) {
  *d = 0;
  return CUDA_SUCCESS;
}
DR cuDeviceGetCount(int* n) {
  *n = 1;
  return CUDA_SUCCESS;
}
DR cuDeviceGetName(char* s, int n, CUdevice) {
  snprintf(s, n, "NVIDIA H200");
  return CUDA_SUCCESS;
}
#undef cuDeviceGetUuid
DR cuDeviceGetUuid(CUuuid* u, CUdevice) {
  memset(u, 1, 16);
  return CUDA_SUCCESS;
}
DR cuDriverGetVersion(int* v) {
  *v = 13000;
  return CUDA_SUCCESS;
}
DR cuDeviceGetAttribute(int* v, CUdevice_attribute a, CUdevice) {
  *v = attribute(a);
  return CUDA_SUCCESS;
}
DR cuCtxGetCurrent(CUcontext* c) {
  *c = (CUcontext)8;
  return CUDA_SUCCESS;
}
DR cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
#undef cuCtxPushCurrent
#undef cuCtxPopCurrent
DR cuCtxPushCurrent(CUcontext) { return CUDA_SUCCESS; }
DR cuCtxPopCurrent(CUcontext*) { return CUDA_SUCCESS; }
DR cuCtxGetDevice(CUdevice* d) {
  *d = 0;
  return CUDA_SUCCESS;
}
DR cuCtxGetLimit(size_t* v, CUlimit) {
  *v = 1 << 20;
  return CUDA_SUCCESS;
}
DR cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }
DR cuDevicePrimaryCtxGetState(CUdevice, unsigned* f, int* a) {
  *f = 0;
  *a = 1;
  return CUDA_SUCCESS;
}
DR cuDevicePrimaryCtxRetain(CUcontext* c, CUdevice) {
  *c = (CUcontext)8;
  return CUDA_SUCCESS;
}
DR cuGetErrorString(CUresult, const char** s) {
  *s = "stub error";
  return CUDA_SUCCESS;
}
DR cuGetErrorName(CUresult, const char** s) {
  *s = "stub error";
  return CUDA_SUCCESS;
}
struct Mod {
  const char* data;
};
struct Fun {
  const char* name;
  int regs, local, shared;
};
static void facts(Fun* f, const char* d) {
  auto* h = (const Elf64_Ehdr*)d;
  if (memcmp(h->e_ident, ELFMAG, 4)) return;
  auto* sh = (const Elf64_Shdr*)(d + h->e_shoff);
  const char* str = d + sh[h->e_shstrndx].sh_offset;
  std::string text = std::string(".text.") + f->name, shr = std::string(".nv.shared.") + f->name;
  for (int i = 0; i < h->e_shnum; i++) {
    const char* n = str + sh[i].sh_name;
    if (text == n) f->regs = sh[i].sh_info >> 24;
    if (shr == n) f->shared = sh[i].sh_size;
    if (!strcmp(n, ".nv.info")) {
      const unsigned char* p = (const unsigned char*)d + sh[i].sh_offset;
      const unsigned char* e = p + sh[i].sh_size;
      while (p + 4 <= e) {
        unsigned fmt = p[0], a = p[1], v = p[2] | p[3] << 8;
        if (fmt == 4) {
          if ((a == 0x11 || a == 0x12) && v == 8) {
            int x;
            memcpy(&x, p + 8, 4);
            if (x > f->local) f->local = x;
          }
          p += 4 + v;
        } else
          p += 4;
      }
    }
  }
}
DR cuModuleLoadData(CUmodule* m, const void* d) {
  *m = (CUmodule) new Mod{(const char*)d};
  return CUDA_SUCCESS;
}
DR cuModuleLoadDataEx(CUmodule* m, const void* d, unsigned, CUjit_option*, void**) {
  *m = (CUmodule) new Mod{(const char*)d};
  return CUDA_SUCCESS;
}
DR cuModuleLoad(CUmodule* m, const char*) {
  *m = (CUmodule) new Mod{nullptr};
  return CUDA_SUCCESS;
}
DR cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
DR cuModuleGetFunction(CUfunction* f, CUmodule m, const char* n) {
  LOCK;
  auto* x = new Fun{interned(std::string("triton:") + n), 0, 0, 0};
  Fun y{n, 0, 0, 0};
  const char* d = ((Mod*)m)->data;
  if (d) facts(&y, d);
  x->regs = y.regs;
  x->local = y.local;
  x->shared = y.shared;
  *f = (CUfunction)x;
  return CUDA_SUCCESS;
}
DR cuFuncGetAttribute(int* v, CUfunction_attribute a, CUfunction f) {
  auto* x = (Fun*)f;
  *v = a == CU_FUNC_ATTRIBUTE_NUM_REGS                ? x->regs
       : a == CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES      ? x->local
       : a == CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES     ? x->shared
       : a == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024
                                                      : 0;
  return CUDA_SUCCESS;
}
DR cuFuncSetAttribute(CUfunction f, CUfunction_attribute a, int v) {
  if (a == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES && v > MOST_SHARED) return CUDA_ERROR_INVALID_VALUE;
  return CUDA_SUCCESS;
}
DR cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
static CUresult dlaunch(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned sh, CUstream s) {
  record('T', ((Fun*)f)->name, sh, s);
  if (sh > MOST_SHARED || gy > MOST_BLOCKS || gz > MOST_BLOCKS) {
    fprintf(stderr, "without_gpu: bad launch %s shared %u\n", ((Fun*)f)->name, sh);
    return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}
DR cuLaunchKernel(CUfunction f, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned g, unsigned sh,
                  CUstream s, void**, void**) {
  return dlaunch(f, a, b, c, d, e, g, sh, s);
}
DR cuLaunchCooperativeKernel(CUfunction f, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned g,
                             unsigned sh, CUstream s, void**) {
  return dlaunch(f, a, b, c, d, e, g, sh, s);
}
DR cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction f, void**, void**) {
  return dlaunch(f, c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY, c->blockDimZ, c->sharedMemBytes,
                 c->hStream);
}
DR cuOccupancyMaxActiveClusters(int* n, CUfunction, const CUlaunchConfig*) {
  *n = 66;
  return CUDA_SUCCESS;
}
DR cuOccupancyMaxActiveBlocksPerMultiprocessor(int* n, CUfunction, int, size_t) {
  *n = 2;
  return CUDA_SUCCESS;
}
DR cuPointerGetAttribute(void* v, CUpointer_attribute a, CUdeviceptr p) {
  auto* r = range_of((void*)p);
  if (!r) return CUDA_ERROR_INVALID_VALUE;
  if (a == CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
    *(CUdeviceptr*)v = p;
  else if (a == CU_POINTER_ATTRIBUTE_MEMORY_TYPE)
    *(unsigned*)v = r->on_host ? 1 : 2;
  else
    *(unsigned long long*)v = 0;
  return CUDA_SUCCESS;
}
DR cuTensorMapEncodeTiled(CUtensorMap* m, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                          const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                          CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  memset(m, 0, sizeof *m);
  return CUDA_SUCCESS;
}
DR cuMemGetAllocationGranularity(size_t* g, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *g = 2 << 20;
  return CUDA_SUCCESS;
}
DR cuMemAddressReserve(CUdeviceptr* p, size_t n, size_t, CUdeviceptr, unsigned long long) {
  *p = (CUdeviceptr)reserve(n, false);
  return *p ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
DR cuMemAddressFree(CUdeviceptr p, size_t) {
  release((void*)p);
  return CUDA_SUCCESS;
}
DR cuMemCreate(CUmemGenericAllocationHandle* h, size_t n, const CUmemAllocationProp*, unsigned long long) {
  LOCK;
  if (used + n > TOTAL - CONTEXT) return CUDA_ERROR_OUT_OF_MEMORY;
  used += n;
  *h = (CUmemGenericAllocationHandle) new size_t(n);
  return CUDA_SUCCESS;
}
DR cuMemRelease(CUmemGenericAllocationHandle h) {
  LOCK;
  used -= *(size_t*)h;
  return CUDA_SUCCESS;
}
DR cuMemMap(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long) { return CUDA_SUCCESS; }
DR cuMemUnmap(CUdeviceptr p, size_t n) {
  madvise((void*)p, n, MADV_DONTNEED);
  return CUDA_SUCCESS;
}
DR cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }
DR cuMemRetainAllocationHandle(CUmemGenericAllocationHandle*, void*) { return CUDA_ERROR_NOT_SUPPORTED; }
DR cuMemExportToShareableHandle(void*, CUmemGenericAllocationHandle, CUmemAllocationHandleType, unsigned long long) {
  return CUDA_ERROR_NOT_SUPPORTED;
}
DR cuMemImportFromShareableHandle(CUmemGenericAllocationHandle*, void*, CUmemAllocationHandleType) {
  return CUDA_ERROR_NOT_SUPPORTED;
}
DR cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp*, CUmemGenericAllocationHandle) {
  return CUDA_ERROR_NOT_SUPPORTED;
}
#undef cuMemsetD32Async
DR cuMemsetD32Async(CUdeviceptr, unsigned, size_t n, CUstream s) {
  record('Z', "memset", n * 4, s);
  return CUDA_SUCCESS;
}
#undef cuStreamWriteValue32
extern "C" {
__asm__(
    ".globl cuCtxFromGreenCtx\n.globl cuDevResourceGenerateDesc\n.globl cuDevSmResourceSplitByCount\n.globl "
    "cuDeviceGetDevResource\n.globl cuGreenCtxCreate\n.globl cuGreenCtxDestroy\n.globl cuGreenCtxStreamCreate\n.globl "
    "cuMulticastAddDevice\n.globl cuMulticastBindMem\n.globl cuMulticastCreate\n.globl cuMulticastUnbind\n.globl "
    "cuStreamWriteValue32\n.globl cuLinkAddData_v2\n.globl cuLinkComplete\n.globl cuLinkCreate_v2\n.globl "
    "cuMemGetAddressRange_v2\n"
    "cuCtxFromGreenCtx:\ncuDevResourceGenerateDesc:\ncuDevSmResourceSplitByCount:\ncuDeviceGetDevResource:"
    "\ncuGreenCtxCreate:\ncuGreenCtxDestroy:\ncuGreenCtxStreamCreate:\ncuMulticastAddDevice:\ncuMulticastBindMem:"
    "\ncuMulticastCreate:\ncuMulticastUnbind:\ncuStreamWriteValue32:\ncuLinkAddData_v2:\ncuLinkComplete:\ncuLinkCreate_"
    "v2:\ncuMemGetAddressRange_v2:\n mov $801, %eax\n ret\n");
}
