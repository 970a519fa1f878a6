// What the stand-in for a device keeps: records of launches, products, copies and waits; memory of the host; captures.
#pragma once

// cuBLAS' headers only name these types. Their own headers need CUDA's C++ library, which torch's wheels do not bring.
#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
struct __half;
struct __nv_bfloat16;

#include <cublasLt.h>
#include <cublas_v2.h>
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#define EXPORTED extern "C" __attribute__((visibility("default")))

inline std::recursive_mutex mutex;
#define LOCK std::lock_guard<std::recursive_mutex> guard(mutex)

// kind: K a kernel of a library, T of Triton, P a product, C a copy, S a wait, Z a memset, G the launch of a graph.
struct Record {
  char kind;
  const char* name;
  size_t bytes;
};
// Objects live until the process ends: libraries call from their own destructors.
inline std::vector<Record>& records() {
  static auto* kept = new std::vector<Record>;
  return *kept;
}
inline const char* interned(const std::string& text) {
  static auto* kept = new std::set<std::string>;
  return kept->insert(text).first->c_str();
}

struct Graph {
  size_t nodes;
};
inline std::map<void*, Graph*> capturing;  // streams
inline bool capture_failed = false;
inline Graph* graph_of(void* stream) {
  auto found = capturing.find(stream);
  return found == capturing.end() ? nullptr : found->second;
}

inline void record(char kind, const char* name, size_t bytes = 0, void* stream = nullptr) {
  LOCK;
  if (Graph* graph = graph_of(stream)) graph->nodes++;
  records().push_back({kind, name, bytes});
}

const size_t TOTAL = 150754820096ull, CONTEXT = 600ull << 20;  // bytes of an H200, and those that are never free
const unsigned MOST_SHARED = 232448,
               MOST_BLOCKS = 65535;  // bytes of a block's shared memory; blocks of a grid's y and z
inline size_t used = 0;
struct Range {
  size_t size;
  bool on_host;
};
inline std::map<char*, Range>& ranges() {
  static auto* kept = new std::map<char*, Range>;
  return *kept;
}
inline Range* range_of(const void* p) {
  LOCK;
  auto found = ranges().upper_bound((char*)p);
  if (found == ranges().begin()) return nullptr;
  --found;
  return (char*)p < found->first + found->second.size ? &found->second : nullptr;
}
inline void* reserve(size_t size, bool on_host) {
  void* p = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return nullptr;
  LOCK;
  ranges()[(char*)p] = {size, on_host};
  return p;
}
inline void release(void* p) {
  LOCK;
  auto found = ranges().find((char*)p);
  if (found == ranges().end()) return;
  munmap(p, found->second.size);
  ranges().erase(found);
}

int attribute(int which);  // of the device
