// A variable of the environment as long as a test needs it.
#pragma once

#include <cstdlib>
#include <optional>
#include <string>

namespace chorale {

// Sets the variable, or removes it where `value` is null, and puts it back at the end of the scope. Only where no other
// thread reads the environment meanwhile.
class EnvironmentVariable {
 public:
  EnvironmentVariable(std::string name, const char* value) : name_(std::move(name)) {
    if (const char* before = std::getenv(name_.c_str())) before_ = before;
    set(value);
  }
  ~EnvironmentVariable() { set(before_ ? before_->c_str() : nullptr); }
  EnvironmentVariable(const EnvironmentVariable&) = delete;
  EnvironmentVariable& operator=(const EnvironmentVariable&) = delete;

 private:
  void set(const char* value) {
    if (value) {
      setenv(name_.c_str(), value, 1);
    } else {
      unsetenv(name_.c_str());
    }
  }
  const std::string name_;
  std::optional<std::string> before_;
};

}  // namespace chorale
