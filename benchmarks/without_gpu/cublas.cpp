// cuBLAS and cuBLASLt: a product is recorded with its sizes and types.
#include "device.h"

static const char* ty(int t) {
  switch (t) {
    case CUDA_R_32F: return "f32";
    case CUDA_R_64F: return "f64";
    case CUDA_R_16F: return "f16";
    case CUDA_R_16BF: return "bf16";
    case CUDA_R_8F_E4M3: return "e4m3";
    case CUDA_R_8F_E5M2: return "e5m2";
    case CUDA_R_8I: return "i8";
    case CUDA_R_32I: return "i32";
  }
  return "?";
}
static const char* ct(int c) {
  switch (c) {
    case CUBLAS_COMPUTE_32F: return "c32";
    case CUBLAS_COMPUTE_32F_FAST_TF32: return "ctf32";
    case CUBLAS_COMPUTE_16F: return "c16";
    case CUBLAS_COMPUTE_64F: return "c64";
    case CUBLAS_COMPUTE_32F_PEDANTIC: return "c32p";
    case CUBLAS_COMPUTE_32I: return "ci32";
  }
  return "c?";
}
static void gemm(const char* api, int m, int n, int k, int a, int b, int c, int comp, int batch, void* st) {
  char s[200];
  snprintf(s, 200, "gemm:%s m%d n%d k%d %s x %s -> %s %s batch%d", api, m, n, k, ty(a), ty(b), ty(c), ct(comp), batch);
  const char* nm;
  {
    LOCK;
    nm = interned(s);
  }
  record('P', nm, (size_t)m * n * k / 1 * batch, st);
}
struct H {
  void* st;
  int mode;
};
#define BL EXPORTED cublasStatus_t
BL cublasCreate_v2(cublasHandle_t* h) {
  *h = (cublasHandle_t) new H{nullptr, 0};
  return CUBLAS_STATUS_SUCCESS;
}
BL cublasDestroy_v2(cublasHandle_t) { return CUBLAS_STATUS_SUCCESS; }
BL cublasSetStream_v2(cublasHandle_t h, cudaStream_t s) {
  ((H*)h)->st = s;
  return CUBLAS_STATUS_SUCCESS;
}
BL cublasSetWorkspace_v2(cublasHandle_t, void*, size_t) { return CUBLAS_STATUS_SUCCESS; }
BL cublasSetMathMode(cublasHandle_t h, cublasMath_t m) {
  ((H*)h)->mode = m;
  return CUBLAS_STATUS_SUCCESS;
}
BL cublasGetMathMode(cublasHandle_t h, cublasMath_t* m) {
  *m = (cublasMath_t)((H*)h)->mode;
  return CUBLAS_STATUS_SUCCESS;
}
BL cublasSetPointerMode_v2(cublasHandle_t, cublasPointerMode_t) { return CUBLAS_STATUS_SUCCESS; }
BL cublasGetPointerMode_v2(cublasHandle_t, cublasPointerMode_t* m) {
  *m = CUBLAS_POINTER_MODE_HOST;
  return CUBLAS_STATUS_SUCCESS;
}
#undef cublasGemmEx
#undef cublasGemmStridedBatchedEx
BL cublasGemmEx(cublasHandle_t h, cublasOperation_t, cublasOperation_t, int m, int n, int k, const void*, const void*,
                cudaDataType a, int, const void*, cudaDataType b, int, const void*, void*, cudaDataType c, int,
                cublasComputeType_t comp, cublasGemmAlgo_t) {
  gemm("ex", m, n, k, a, b, c, comp, 1, ((H*)h)->st);
  return CUBLAS_STATUS_SUCCESS;
}
BL cublasGemmStridedBatchedEx(cublasHandle_t h, cublasOperation_t, cublasOperation_t, int m, int n, int k, const void*,
                              const void*, cudaDataType a, int, long long, const void*, cudaDataType b, int, long long,
                              const void*, void*, cudaDataType c, int, long long, int batch, cublasComputeType_t comp,
                              cublasGemmAlgo_t) {
  gemm("batched", m, n, k, a, b, c, comp, batch, ((H*)h)->st);
  return CUBLAS_STATUS_SUCCESS;
}
BL cublasSgemm_v2(cublasHandle_t h, cublasOperation_t, cublasOperation_t, int m, int n, int k, const float*,
                  const float*, int, const float*, int, const float*, float*, int) {
  gemm("sgemm", m, n, k, CUDA_R_32F, CUDA_R_32F, CUDA_R_32F,
       ((H*)h)->mode & 3 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F, 1, ((H*)h)->st);
  return CUBLAS_STATUS_SUCCESS;
}
BL cublasDgemm_v2(cublasHandle_t h, cublasOperation_t, cublasOperation_t, int m, int n, int k, const double*,
                  const double*, int, const double*, int, const double*, double*, int) {
  gemm("dgemm", m, n, k, CUDA_R_64F, CUDA_R_64F, CUDA_R_64F, CUBLAS_COMPUTE_64F, 1, ((H*)h)->st);
  return CUBLAS_STATUS_SUCCESS;
}
BL cublasSgemmStridedBatched(cublasHandle_t h, cublasOperation_t, cublasOperation_t, int m, int n, int k, const float*,
                             const float*, int, long long, const float*, int, long long, const float*, float*, int,
                             long long, int batch) {
  gemm("sgemmB", m, n, k, CUDA_R_32F, CUDA_R_32F, CUDA_R_32F, CUBLAS_COMPUTE_32F, batch, ((H*)h)->st);
  return CUBLAS_STATUS_SUCCESS;
}
BL cublasSgemv_v2(cublasHandle_t h, cublasOperation_t, int m, int n, const float*, const float*, int, const float*, int,
                  const float*, float*, int) {
  gemm("sgemv", m, n, 1, CUDA_R_32F, CUDA_R_32F, CUDA_R_32F, CUBLAS_COMPUTE_32F, 1, ((H*)h)->st);
  return CUBLAS_STATUS_SUCCESS;
}
BL cublasSdot_v2(cublasHandle_t h, int n, const float*, int, const float*, int, float*) {
  record('P', "sdot", n, ((H*)h)->st);
  return CUBLAS_STATUS_SUCCESS;
}
BL cublasDotEx(cublasHandle_t h, int n, const void*, cudaDataType, int, const void*, cudaDataType, int, void*,
               cudaDataType, cudaDataType) {
  record('P', "dotex", n, ((H*)h)->st);
  return CUBLAS_STATUS_SUCCESS;
}
struct Layout {
  int type;
  uint64_t rows, cols;
  int batch;
};
struct Desc {
  int comp, ta, tb, epi;
};
BL cublasLtCreate(cublasLtHandle_t* h) {
  *h = (cublasLtHandle_t) new H{nullptr, 0};
  return CUBLAS_STATUS_SUCCESS;
}
EXPORTED size_t cublasLtGetVersion() { return 130100; }
BL cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* l, cudaDataType t, uint64_t r, uint64_t c, int64_t) {
  *l = (cublasLtMatrixLayout_t) new Layout{t, r, c, 1};
  return CUBLAS_STATUS_SUCCESS;
}
BL cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t l) {
  delete (Layout*)l;
  return CUBLAS_STATUS_SUCCESS;
}
BL cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t l, cublasLtMatrixLayoutAttribute_t a, const void* v,
                                    size_t) {
  if (a == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT) ((Layout*)l)->batch = *(int*)v;
  return CUBLAS_STATUS_SUCCESS;
}
BL cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* d, cublasComputeType_t c, cudaDataType_t) {
  *d = (cublasLtMatmulDesc_t) new Desc{c, 0, 0, 0};
  return CUBLAS_STATUS_SUCCESS;
}
BL cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t d) {
  delete (Desc*)d;
  return CUBLAS_STATUS_SUCCESS;
}
BL cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t d, cublasLtMatmulDescAttributes_t a, const void* v, size_t) {
  auto* x = (Desc*)d;
  if (a == CUBLASLT_MATMUL_DESC_TRANSA) x->ta = *(int*)v;
  if (a == CUBLASLT_MATMUL_DESC_TRANSB) x->tb = *(int*)v;
  if (a == CUBLASLT_MATMUL_DESC_EPILOGUE) x->epi = *(int*)v;
  return CUBLAS_STATUS_SUCCESS;
}
BL cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* p) {
  *p = (cublasLtMatmulPreference_t)malloc(64);
  return CUBLAS_STATUS_SUCCESS;
}
BL cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t p) {
  free(p);
  return CUBLAS_STATUS_SUCCESS;
}
BL cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t, const void*,
                                        size_t) {
  return CUBLAS_STATUS_SUCCESS;
}
BL cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t,
                                  cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                  cublasLtMatmulPreference_t, int, cublasLtMatmulHeuristicResult_t* r, int* n) {
  memset(r, 0, sizeof *r);
  *n = 1;
  return CUBLAS_STATUS_SUCCESS;
}
BL cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t d, const void*, const void*, cublasLtMatrixLayout_t A,
                  const void*, cublasLtMatrixLayout_t B, const void*, const void*, cublasLtMatrixLayout_t, void*,
                  cublasLtMatrixLayout_t D, const cublasLtMatmulAlgo_t*, void*, size_t, cudaStream_t s) {
  auto* x = (Desc*)d;
  auto *a = (Layout*)A, *b = (Layout*)B, *o = (Layout*)D;
  char api[32];
  snprintf(api, 32, x->epi > 1 ? "lt-epi%d" : "lt", x->epi);
  gemm(api, o->rows, o->cols, x->ta ? a->rows : a->cols, a->type, b->type, o->type, x->comp, a->batch, s);
  return CUBLAS_STATUS_SUCCESS;
}
