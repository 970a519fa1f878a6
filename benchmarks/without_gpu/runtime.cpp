// CUDA's runtime without a device: memory is the host's, kernels are recorded and not run, copies move up to a
// megabyte.
#include "device.h"

#define RT EXPORTED cudaError_t
// Read by steps.py.
EXPORTED size_t record_count() { return records().size(); }
EXPORTED char record_kind(size_t i) { return records()[i].kind; }
EXPORTED const char* record_name(size_t i) { return records()[i].name; }
EXPORTED size_t record_bytes(size_t i) { return records()[i].bytes; }
EXPORTED void clear_records() {
  LOCK;
  records().clear();
}

static void wait(const char* what, size_t bytes = 0, void* stream = nullptr) { record('S', what, bytes, stream); }
RT cudaGetDeviceCount(int* n) {
  const char* v = getenv("CUDA_VISIBLE_DEVICES");
  if (v && !*v) {
    *n = 0;
    return cudaErrorNoDevice;
  }
  *n = 1;
  return cudaSuccess;
}
RT cudaGetDevice(int* n) {
  *n = 0;
  return cudaSuccess;
}
RT cudaSetDevice(int n) { return n == 0 ? cudaSuccess : cudaErrorInvalidDevice; }
RT cudaDriverGetVersion(int* v) {
  *v = 13000;
  return cudaSuccess;
}
RT cudaRuntimeGetVersion(int* v) {
  *v = 13000;
  return cudaSuccess;
}
RT cudaGetLastError() { return cudaSuccess; }
RT cudaPeekAtLastError() { return cudaSuccess; }
RT cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "NVIDIA H200");
  p->totalGlobalMem = TOTAL;
  p->sharedMemPerBlock = 49152;
  p->regsPerBlock = 65536;
  p->warpSize = 32;
  p->memPitch = 2147483647;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = MOST_BLOCKS;
  p->totalConstMem = 65536;
  p->major = 9;
  p->minor = 0;
  p->multiProcessorCount = 132;
  p->concurrentKernels = 1;
  p->unifiedAddressing = 1;
  p->memoryBusWidth = 6144;
  p->l2CacheSize = 62914560;
  p->maxThreadsPerMultiProcessor = 2048;
  p->streamPrioritiesSupported = 1;
  p->sharedMemPerMultiprocessor = 233472;
  p->regsPerMultiprocessor = 65536;
  p->cooperativeLaunch = 1;
  p->sharedMemPerBlockOptin = MOST_SHARED;
  p->maxBlocksPerMultiProcessor = 32;
  p->reservedSharedMemPerBlock = 1024;
  p->clusterLaunch = 1;
  p->textureAlignment = 512;
  p->pciBusID = 3;
  p->managedMemory = 1;
  p->asyncEngineCount = 3;
  return cudaSuccess;
}
RT cudaDeviceGetAttribute(int* v, cudaDeviceAttr a, int) {
  *v = attribute((int)a);
  return cudaSuccess;
}
RT cudaDeviceGetPCIBusId(char* s, int n, int) {
  snprintf(s, n, "0000:03:00.0");
  return cudaSuccess;
}
RT cudaDeviceCanAccessPeer(int* v, int, int) {
  *v = 0;
  return cudaSuccess;
}
RT cudaDeviceGetStreamPriorityRange(int* a, int* b) {
  if (a) *a = 0;
  if (b) *b = -5;
  return cudaSuccess;
}
RT cudaMemGetInfo(size_t* f, size_t* t) {
  *t = TOTAL;
  *f = TOTAL - used - CONTEXT;
  return cudaSuccess;
}
RT cudaMalloc(void** p, size_t n) {
  if (used + n > TOTAL - CONTEXT) return cudaErrorMemoryAllocation;
  *p = reserve(n, false);
  if (!*p) return cudaErrorMemoryAllocation;
  used += n;
  return cudaSuccess;
}
RT cudaMallocManaged(void** p, size_t n, unsigned) { return cudaMalloc(p, n); }
RT cudaFree(void* p) {
  if (!p) return cudaSuccess;
  auto* r = range_of(p);
  if (r) used -= r->size;
  release(p);
  return cudaSuccess;
}
RT cudaHostAlloc(void** p, size_t n, unsigned) {
  *p = reserve(n, true);
  return *p ? cudaSuccess : cudaErrorMemoryAllocation;
}
RT cudaMallocHost(void** p, size_t n) { return cudaHostAlloc(p, n, 0); }
RT cudaFreeHost(void* p) {
  release(p);
  return cudaSuccess;
}
RT cudaHostRegister(void* p, size_t n, unsigned) {
  LOCK;
  ranges()[(char*)p] = {n, true};
  return cudaSuccess;
}
RT cudaHostUnregister(void* p) {
  LOCK;
  ranges().erase((char*)p);
  return cudaSuccess;
}
RT cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  memset(a, 0, sizeof *a);
  auto* r = range_of(p);
  a->type = !r ? cudaMemoryTypeUnregistered : r->on_host ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  a->devicePointer = a->hostPointer = (void*)p;
  return cudaSuccess;
}
static const size_t COPIED = 1 << 20;
static void copy(void* d, const void* s, size_t n) {
  auto *a = range_of(d), *b = range_of(s);
  if (b && !b->on_host && (!a || a->on_host))
    memset(d, 0, n);
  else if (n <= COPIED)
    memmove(d, s, n);
}
static const char* way(const void* d, const void* s) {
  auto *a = range_of(d), *b = range_of(s);
  bool da = a && !a->on_host, db = b && !b->on_host;
  if (da && db) return "copy D2D";
  if (da) return b ? "copy H2D pinned" : "copy H2D pageable";
  if (db) return a ? "copy D2H pinned" : "copy D2H pageable";
  return "copy H2H";
}
RT cudaMemcpyAsync(void* d, const void* s, size_t n, cudaMemcpyKind, cudaStream_t st) {
  const char* w = way(d, s);
  record('C', w, n, st);
  if (w[strlen(w) - 1] == 'e') {
    if (graph_of(st)) {
      capture_failed = true;
      return cudaErrorStreamCaptureUnsupported;
    }
    wait("pageable copy", n, st);
  }
  copy(d, s, n);
  return cudaSuccess;
}
RT cudaMemcpy(void* d, const void* s, size_t n, cudaMemcpyKind) {
  record('C', way(d, s), n);
  wait("cudaMemcpy", n);
  copy(d, s, n);
  return cudaSuccess;
}
RT cudaMemcpy2DAsync(void*, size_t, const void*, size_t, size_t w, size_t h, cudaMemcpyKind, cudaStream_t st) {
  record('C', "copy 2D", w * h, st);
  return cudaSuccess;
}
RT cudaMemcpyPeerAsync(void*, int, const void*, int, size_t n, cudaStream_t st) {
  record('C', "copy peer", n, st);
  return cudaSuccess;
}
RT cudaMemsetAsync(void* p, int v, size_t n, cudaStream_t st) {
  record('Z', "memset", n, st);
  if (n <= COPIED) memset(p, v, n);
  return cudaSuccess;
}
RT cudaMemset(void* p, int v, size_t n) {
  record('Z', "memset sync", n);
  if (n <= COPIED) memset(p, v, n);
  return cudaSuccess;
}
RT cudaMemcpyToSymbol(const void*, const void*, size_t n, size_t, cudaMemcpyKind) {
  record('C', "to symbol", n);
  return cudaSuccess;
}
RT cudaGetSymbolAddress(void** p, const void*) {
  static char* mem = (char*)reserve(1 << 20, false);
  *p = mem;
  return cudaSuccess;
}
RT cudaMemPrefetchAsync(const void*, size_t, cudaMemLocation, unsigned, cudaStream_t) { return cudaSuccess; }
RT cudaDeviceSynchronize() {
  if (!capturing.empty()) {
    capture_failed = true;
    return cudaErrorStreamCaptureUnsupported;
  }
  wait("cudaDeviceSynchronize");
  return cudaSuccess;
}

// Streams, events and graphs.
struct Stream {
  int id;
};
static unsigned long long capture_id = 1;
struct Event {
  Graph* in = nullptr;
};
RT cudaStreamCreateWithPriority(cudaStream_t* s, unsigned, int) {
  *s = (cudaStream_t) new Stream{0};
  return cudaSuccess;
}
RT cudaStreamCreateWithFlags(cudaStream_t* s, unsigned) {
  *s = (cudaStream_t) new Stream{0};
  return cudaSuccess;
}
RT cudaStreamCreate(cudaStream_t* s) {
  *s = (cudaStream_t) new Stream{0};
  return cudaSuccess;
}
RT cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
RT cudaStreamGetPriority(cudaStream_t, int* p) {
  *p = 0;
  return cudaSuccess;
}
RT cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
RT cudaStreamSynchronize(cudaStream_t s) {
  if (graph_of(s)) {
    capture_failed = true;
    return cudaErrorStreamCaptureUnsupported;
  }
  wait("cudaStreamSynchronize", 0, s);
  return cudaSuccess;
}
RT cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned) {
  LOCK;
  auto* ev = (Event*)e;
  if (ev->in) capturing[s] = ev->in;
  return cudaSuccess;
}
RT cudaStreamAddCallback(cudaStream_t, cudaStreamCallback_t, void*, unsigned) { return cudaSuccess; }
RT cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t f, void* u) {
  f(u);
  return cudaSuccess;
}
RT cudaEventCreate(cudaEvent_t* e) {
  *e = (cudaEvent_t) new Event;
  return cudaSuccess;
}
RT cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) {
  *e = (cudaEvent_t) new Event;
  return cudaSuccess;
}
RT cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
RT cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
  LOCK;
  ((Event*)e)->in = graph_of(s);
  return cudaSuccess;
}
RT cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned) { return cudaEventRecord(e, s); }
RT cudaEventQuery(cudaEvent_t e) {
  if (((Event*)e)->in) {
    for (auto& c : capturing)
      if (c.second == ((Event*)e)->in) {
        capture_failed = true;
        return cudaErrorCapturedEvent;
      }
  }
  return cudaSuccess;
}
RT cudaEventSynchronize(cudaEvent_t e) {
  wait("cudaEventSynchronize");
  return cudaSuccess;
}
RT cudaEventElapsedTime(float* ms, cudaEvent_t, cudaEvent_t) {
  *ms = 1.0f;
  return cudaSuccess;
}
RT cudaStreamIsCapturing(cudaStream_t s, cudaStreamCaptureStatus* st) {
  *st = graph_of(s) ? (capture_failed ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive)
                    : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
RT cudaStreamGetCaptureInfo(cudaStream_t s, cudaStreamCaptureStatus* st, unsigned long long* id, cudaGraph_t* g,
                            const cudaGraphNode_t** d, const cudaGraphEdgeData** ed, size_t* n) {
  cudaStreamIsCapturing(s, st);
  if (id) *id = capture_id;
  if (g) *g = (cudaGraph_t)graph_of(s);
  if (d) *d = nullptr;
  if (ed) *ed = nullptr;
  if (n) *n = 0;
  return cudaSuccess;
}
RT cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode) {
  LOCK;
  if (!s) return cudaErrorStreamCaptureUnsupported;
  capture_id++;
  capture_failed = false;
  capturing[s] = new Graph{0};
  return cudaSuccess;
}
RT cudaStreamEndCapture(cudaStream_t s, cudaGraph_t* g) {
  LOCK;
  Graph* gr = graph_of(s);
  if (!gr) return cudaErrorIllegalState;
  for (auto i = capturing.begin(); i != capturing.end();) i = i->second == gr ? capturing.erase(i) : std::next(i);
  if (capture_failed) {
    *g = nullptr;
    capture_failed = false;
    return cudaErrorStreamCaptureInvalidated;
  }
  *g = (cudaGraph_t)gr;
  return cudaSuccess;
}
RT cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* m) {
  static thread_local cudaStreamCaptureMode now = cudaStreamCaptureModeGlobal;
  std::swap(now, *m);
  return cudaSuccess;
}
RT cudaGraphInstantiateWithFlags(cudaGraphExec_t* e, cudaGraph_t g, unsigned long long) {
  *e = (cudaGraphExec_t)g;
  return cudaSuccess;
}
RT cudaGraphInstantiate(cudaGraphExec_t* e, cudaGraph_t g, unsigned long long) {
  *e = (cudaGraphExec_t)g;
  return cudaSuccess;
}
RT cudaGraphLaunch(cudaGraphExec_t e, cudaStream_t s) {
  record('G', "graph launch", ((Graph*)e)->nodes, s);
  return cudaSuccess;
}
RT cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t*, size_t* n) {
  *n = ((Graph*)g)->nodes;
  return cudaSuccess;
}
RT cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
RT cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }
RT cudaGraphDebugDotPrint(cudaGraph_t, const char*, unsigned) { return cudaSuccess; }
RT cudaGraphNodeGetDependencies(cudaGraphNode_t, cudaGraphNode_t*, cudaGraphEdgeData*, size_t* n) {
  *n = 0;
  return cudaSuccess;
}
RT cudaProfilerStart() { return cudaSuccess; }
RT cudaProfilerStop() { return cudaSuccess; }
