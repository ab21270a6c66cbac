#include "chorale/train/job_device.h"

#include "chorale/base/error.h"
#include "chorale/device/runtime.h"

namespace chorale::train {
namespace {

constexpr Device kFirstGpu{DeviceType::kCuda, 0};

// What parts of models and generated kernels cannot use yet.
const char* needs_cpu(const TrainOptions& options) {
  if (options.tp > 1) return "--tp";
  return options.compile ? "--compile" : nullptr;
}

int gpus_here() {
  try {
    return runtime_of(kFirstGpu).count();
  } catch (const Error&) {
    return 0;  // `chorale doctor` says why
  }
}

}  // namespace

int64_t gpus_of(const TrainOptions& options) {
  const bool wanted = options.device == "cuda" || (options.device == "auto" && !needs_cpu(options));
  return wanted ? gpus_here() : 0;
}

Device device_of(const TrainOptions& options, int rank) {
  const bool any = options.device == "auto" || options.device == "cuda";
  const int64_t gpus = any ? gpus_of(options) : 0;
  if (options.device == "auto" && gpus == 0) return kCpu;
  const Device device =
      gpus > 0 ? Device{DeviceType::kCuda, static_cast<int16_t>(rank % gpus)} : device_from_name(options.device);
  CHORALE_CHECK(device.type != DeviceType::kNull,
                "[train] --device null has no memory to train in; expected cpu, cuda, cuda:N or auto");
  if (device == kCpu) return device;
  if (const char* option = needs_cpu(options))
    throw InvalidArgument(concat("[train] ", option, " works on the CPU only so far; leave out --device ",
                                 options.device, ", or ", option));
  runtime_of(device);  // says what is missing
  return device;
}

}  // namespace chorale::train
