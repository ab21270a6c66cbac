#include "chorale/base/log.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <memory>

namespace chorale {
namespace {

spdlog::logger& logger() {
  // Never destroyed: threads may log while the process ends.
  static spdlog::logger& instance = *[] {
    auto made = std::make_unique<spdlog::logger>("chorale", std::make_shared<spdlog::sinks::stderr_sink_mt>());
    made->set_pattern("chorale %H:%M:%S.%e %l: %v");
    made->flush_on(spdlog::level::info);
    return made.release();
  }();
  return instance;
}

}  // namespace

void log_as(const std::string& who) { logger().set_pattern("chorale %H:%M:%S.%e " + who + " %l: %v"); }
void log_info(const std::string& message) { logger().info("{}", message); }
void log_warning(const std::string& message) { logger().warn("{}", message); }

}  // namespace chorale
