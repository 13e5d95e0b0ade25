/* Stand-in for libcute_dsl_runtime.so, the library that host code compiled by CuTe DSL calls.
 *
 * It owns no CUDA context: loading an image, asking for a device attribute and launching a kernel
 * go to callbacks; everything else either has an obvious answer for one in-order device or is
 * refused by name. The entry points and their signatures are those that the host module of
 * nvidia-cutlass-dsl 4.8.1 declares (`str(compiled.ir_module)`); error codes are cudaError_t.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, MEMORY_ALLOCATION = 2, NO_DEVICE = 100, INVALID_DEVICE = 101,
       NOT_FOUND = 500, NOT_SUPPORTED = 801 };
enum { STATIC_SHARED_BYTES = 1 }; /* CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES */

struct launch_config { /* cudaLaunchConfig_t */
    uint32_t grid[3], block[3];
    uint64_t dynamic_smem_bytes;
    void *stream;
    const void *attributes;
    uint32_t num_attributes;
};

struct callbacks {
    int (*load_image)(const void *image, int *library_id);
    int (*launch)(int library_id, const char *kernel, const struct launch_config *, void **params);
    int (*device_attribute)(int attribute, int *value);
    int (*function_attribute)(int library_id, const char *kernel, int attribute, int value);
    void (*refused)(const char *entry_point);
};

struct library { int id; };
struct kernel { int library_id; char name[]; };

static struct callbacks on;
static int active;

void rubin_moe_attach(const struct callbacks *callbacks) { on = *callbacks; active = 1; }
void rubin_moe_detach(void) { active = 0; }

static int refuse(const char *entry_point) {
    if (!active) return NO_DEVICE;
    on.refused(entry_point);
    return NOT_SUPPORTED;
}

/* --- libraries and kernels ------------------------------------------------------------------ */

int _cudaLibraryLoadData(void **library, const void *image, void *jit_options, void *jit_values,
                         int num_jit, void *options, void *values, int num_options) {
    if (!active) return NO_DEVICE;
    struct library *lib = malloc(sizeof *lib);
    if (!lib) return MEMORY_ALLOCATION;
    int rc = on.load_image(image, &lib->id);
    if (rc) free(lib);
    else *library = lib;
    return rc;
}

int _cudaLibraryUnload(void *library) { free(library); return SUCCESS; }

int _cudaLibraryGetKernel(void **kernel, void *library, const char *name) {
    struct kernel *k = malloc(sizeof *k + strlen(name) + 1);
    if (!k) return MEMORY_ALLOCATION;
    k->library_id = ((struct library *)library)->id;
    strcpy(k->name, name);
    *kernel = k; /* lives as long as the host module that keeps the handle in a global */
    return SUCCESS;
}

static int set_attribute(struct kernel *k, int attribute, int value) {
    return active ? on.function_attribute(k->library_id, k->name, attribute, value) : NO_DEVICE;
}

int _cudaFuncSetAttribute(void *kernel, int attribute, int value) {
    return set_attribute(kernel, attribute, value);
}

int _cudaKernelSetAttributeForDevice(void *kernel, int attribute, int value, int device) {
    return device ? INVALID_DEVICE : set_attribute(kernel, attribute, value);
}

int _cuKernelGetAttribute(int *value, int attribute, void *kernel, int device) {
    if (attribute != STATIC_SHARED_BYTES) return refuse("cuKernelGetAttribute");
    *value = 0; /* the DSL places all shared memory in the dynamic segment */
    return SUCCESS;
}

/* --- launches ------------------------------------------------------------------------------- */

int _cudaLaunchKernelEx(const struct launch_config *config, void *kernel, void **params) {
    struct kernel *k = kernel;
    return active ? on.launch(k->library_id, k->name, config, params) : NO_DEVICE;
}

int _cudaLaunchKernel(void *kernel, int grid_x, int grid_y, int grid_z, int block_x, int block_y,
                      int block_z, void **params, uint64_t dynamic_smem_bytes, void *stream) {
    struct launch_config config = {
        {grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, dynamic_smem_bytes, stream, NULL, 0};
    return _cudaLaunchKernelEx(&config, kernel, params);
}

/* --- one device, whose launches have finished when they return ------------------------------- */

int _cudaGetDeviceCount(int *count) { *count = active; return SUCCESS; }
int _cudaGetDevice(int *device) { *device = 0; return active ? SUCCESS : NO_DEVICE; }
int _cuDeviceGet(int *device, int ordinal) { *device = 0; return ordinal ? INVALID_DEVICE : SUCCESS; }
int _cudaSetDevice(int device) { return device ? INVALID_DEVICE : SUCCESS; }
int _cudaDeviceSynchronize(void) { return SUCCESS; }
int _cudaStreamSynchronize(void *stream) { return SUCCESS; }
int _cudaStreamWaitEvent(void *stream, void *event, int flags) { return SUCCESS; }

int _cudaDeviceGetAttribute(int *value, int attribute, int device) {
    if (device) return INVALID_DEVICE;
    return active ? on.device_attribute(attribute, value) : NO_DEVICE;
}

int _cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *kernel, int threads,
                                                   size_t dynamic_smem_bytes) {
    *blocks = 1; /* the emulator gives each CTA a whole SM */
    return SUCCESS;
}

/* --- TVM-FFI flavour: the host module loads its image at the first call, under these ----------- */

int cuda_dialect_init_library_once(void **state, int (*init)(void **library),
                                   int (*load_to_device)(void **library, int device),
                                   void *set_raised) {
    if (*state) return SUCCESS;
    void *library = NULL;
    int rc = init(&library);
    if (!rc) rc = load_to_device(&library, 0);
    if (!rc) *state = library;
    return rc;
}

void cuda_dialect_unload_library_once(void **state) { *state = NULL; }

const char *cuda_dialect_get_error_name(int code) { return "emulated launch failed"; }

void CuteDSLRT_TVMFFISetRaisedCudaError(void (*set_raised)(const char *kind, const char *message),
                                        int code) {
    set_raised("RuntimeError", cuda_dialect_get_error_name(code));
}

/* --- named refusals -------------------------------------------------------------------------- */

#define REFUSED(name) int _##name(void) { return refuse(#name); }
REFUSED(cuLibraryGetGlobal) REFUSED(cuLibraryGetKernel) REFUSED(cuLibraryGetKernelCount)
REFUSED(cuLibraryGetManaged) REFUSED(cuLibraryGetModule) REFUSED(cuLibraryGetUnifiedFunction)
REFUSED(cuLibraryLoadData) REFUSED(cuLibraryLoadFromFile) REFUSED(cuLibraryUnload)
REFUSED(cuTensorMapEncodeTiled) REFUSED(cudaEventCreate) REFUSED(cudaEventDestroy)
REFUSED(cudaEventElapsedTime) REFUSED(cudaEventRecord) REFUSED(cudaFree) REFUSED(cudaFreeAsync)
REFUSED(cudaFreeHost) REFUSED(cudaGetDeviceProperties) REFUSED(cudaGraphDestroy)
REFUSED(cudaGraphExecDestroy) REFUSED(cudaGraphInstantiate) REFUSED(cudaGraphLaunch)
REFUSED(cudaLibraryGetGlobal) REFUSED(cudaLibraryGetKernelCount) REFUSED(cudaLibraryGetManaged)
REFUSED(cudaLibraryGetUnifiedFunction) REFUSED(cudaLibraryLoadFromFile) REFUSED(cudaMalloc)
REFUSED(cudaMallocAsync) REFUSED(cudaMallocHost) REFUSED(cudaMallocManaged) REFUSED(cudaMemcpy)
REFUSED(cudaMemcpyAsync) REFUSED(cudaMemset) REFUSED(cudaMemsetAsync) REFUSED(cudaProfilerStart)
REFUSED(cudaProfilerStop) REFUSED(cudaStreamAddCallback) REFUSED(cudaStreamBeginCapture)
REFUSED(cudaStreamCreate) REFUSED(cudaStreamDestroy) REFUSED(cudaStreamEndCapture)
