#include "null_gpu/errors.hpp"

namespace vram::null_gpu {

namespace {

constexpr struct Known {
  Result error;
  const char* runtime;
  const char* driver;
  const char* text;
} kKnown[] = {
    {kSuccess, "cudaSuccess", "CUDA_SUCCESS", "no error"},
    {kInvalidValue, "cudaErrorInvalidValue", "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {kOutOfMemory, "cudaErrorMemoryAllocation", "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {kInvalidDevice, "cudaErrorInvalidDevice", "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {kPeerUnsupported, "cudaErrorPeerAccessUnsupported", "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED",
     "peer access is not supported between these two devices"},
    {kInvalidHandle, "cudaErrorInvalidResourceHandle", "CUDA_ERROR_INVALID_HANDLE",
     "invalid resource handle"},
    {kNotFound, "cudaErrorSymbolNotFound", "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {kNotReady, "cudaErrorNotReady", "CUDA_ERROR_NOT_READY", "device not ready"},
    {kPeerEnabled, "cudaErrorPeerAccessAlreadyEnabled", "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED",
     "peer access is already enabled"},
    {kPeerNotEnabled, "cudaErrorPeerAccessNotEnabled", "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED",
     "peer access has not been enabled"},
    {kAlreadyLocked, "cudaErrorHostMemoryAlreadyRegistered", "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
     "part or all of the requested memory range is already mapped"},
    {kNotLocked, "cudaErrorHostMemoryNotRegistered", "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
     "pointer does not correspond to a registered memory region"},
    {kNotPermitted, "cudaErrorNotPermitted", "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {kNotSupported, "cudaErrorNotSupported", "CUDA_ERROR_NOT_SUPPORTED",
     "operation not supported by the null GPU"},
    {kCaptureUnmatched, "cudaErrorStreamCaptureUnmatched", "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED",
     "the capture was not initiated in this stream"},
    {kCaptureImplicit, "cudaErrorStreamCaptureImplicit", "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
     "operation would make the legacy stream depend on a capturing blocking stream"},
};

const Known& known(Result error) {
  for (const Known& each : kKnown)
    if (each.error == error) return each;
  static constexpr Known unknown{-1, "cudaErrorUnknown", "CUDA_ERROR_UNKNOWN", "unknown error"};
  return unknown;
}

}  // namespace

const char* error_text(Result error) { return known(error).text; }
const char* runtime_error_name(Result error) { return known(error).runtime; }
const char* driver_error_name(Result error) { return known(error).driver; }

Result& last_error() {
  thread_local Result error = kSuccess;
  return error;
}

}  // namespace vram::null_gpu
