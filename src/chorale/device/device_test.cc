#include "chorale/device/device.h"

#include <gtest/gtest.h>

#include "chorale/base/error.h"

namespace chorale {
namespace {

TEST(Device, NameRoundTrips) {
  for (const char* name : {"cpu", "null", "cuda:0", "cuda:7", "cuda:32767"}) {
    EXPECT_EQ(concat(device_from_name(name)), name);
  }
  EXPECT_EQ(device_from_name("cuda"), (Device{DeviceType::kCuda, 0}));
  EXPECT_NE(device_from_name("cuda:1"), device_from_name("cuda:0"));
}

TEST(Device, AnUnknownNameIsAnErrorThatQuotesIt) {
  for (const char* name :
       {"", "CPU", "cpu:0", "cuda:", "cuda:-1", "cuda:x", "cuda:1x", "cuda:99999", "cuda: 1", "tpu"}) {
    try {
      device_from_name(name);
      FAIL() << "no error for " << name;
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find("'" + std::string(name) + "'"), std::string::npos) << error.what();
    }
  }
}

}  // namespace
}  // namespace chorale
