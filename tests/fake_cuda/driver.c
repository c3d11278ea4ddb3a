/* What torch asks CUDA's runtime and driver in a backward pass: there is one device, and it has no context.
 * Preloaded, it is found before the runtime, and stands for libcuda.so.1 where there is none. */
int cudaGetDeviceCount(int *count) { *count = 1; return 0; }
int cudaGetDevice(int *device) { *device = 0; return 0; }
int cudaSetDevice(int device) { (void)device; return 0; }
int cudaGetLastError(void) { return 0; }
int cudaDriverGetVersion(int *version) { *version = 13000; return 0; }
int cudaStreamIsCapturing(void *stream, int *status) { (void)stream; *status = 0; return 0; }
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -1; return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    (void)device;
    *flags = 0;
    *active = 0;
    return 0;
}
