// How CHORALE_MODULE shows a module's members: one by one, with the containers among them taken apart.
#pragma once

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <typeinfo>
#include <vector>

#include "chorale/nn/parameter.h"

namespace chorale::nn {

class Module;

class MemberVisitor {
 public:
  virtual ~MemberVisitor() = default;
  virtual void parameter(const std::string& name, Parameter& member) = 0;
  virtual void buffer(const std::string& name, Buffer& member) = 0;
  virtual void module(const std::string& name, Module& member) = 0;
  // What a module has and deliberately leaves out.
  virtual void unlisted(const void* /*begin*/, size_t /*bytes*/) {}
  // Called before what a shared pointer points at is visited; a result that is not null takes its place. `copy` makes a
  // copy of it.
  virtual std::shared_ptr<void> shared(const void*, const std::function<std::shared_ptr<void>()>&) { return {}; }
};

// Used in CHORALE_MODULE: a member under another name than the variable's. The name may have dots.
template <class T>
struct Named {
  std::string name;
  T& member;
};
template <class T>
Named<T> named(std::string name, T& member) {
  return {std::move(name), member};
}

// Used in CHORALE_MODULE: a member that takes no part, neither saved nor trained nor told of train() and eval().
template <class T>
struct Unlisted {
  T& member;
};
template <class T>
Unlisted<T> unlisted(T& member) {
  return {member};
}

inline void visit_member(MemberVisitor& visitor, const std::string& name, Parameter& member) {
  if (member.defined()) visitor.parameter(name, member);
}
inline void visit_member(MemberVisitor& visitor, const std::string& name, Buffer& member) {
  if (member.defined()) visitor.buffer(name, member);
}
inline void visit_member(MemberVisitor& visitor, const std::string& name, Module& member) {
  visitor.module(name, member);
}
template <class T>
void visit_member(MemberVisitor& visitor, const std::string&, Named<T> member);
template <class T>
void visit_member(MemberVisitor& visitor, const std::string&, Unlisted<T> left_out) {
  visitor.unlisted(&left_out.member, sizeof(T));
}
template <class T>
void visit_member(MemberVisitor& visitor, const std::string& name, std::vector<T>& members);
template <class T, size_t N>
void visit_member(MemberVisitor& visitor, const std::string& name, std::array<T, N>& members);
template <class T>
void visit_member(MemberVisitor& visitor, const std::string& name, std::map<std::string, T>& members);
template <class T>
void visit_member(MemberVisitor& visitor, const std::string& name, std::optional<T>& member);
template <class T>
void visit_member(MemberVisitor& visitor, const std::string& name, std::unique_ptr<T>& member);
template <class T>
void visit_member(MemberVisitor& visitor, const std::string& name, std::shared_ptr<T>& member);

template <class T>
void visit_member(MemberVisitor& visitor, const std::string&, Named<T> member) {
  visit_member(visitor, member.name, member.member);
}
template <class T>
void visit_member(MemberVisitor& visitor, const std::string& name, std::vector<T>& members) {
  for (size_t i = 0; i < members.size(); ++i) visit_member(visitor, name + "." + std::to_string(i), members[i]);
}
template <class T, size_t N>
void visit_member(MemberVisitor& visitor, const std::string& name, std::array<T, N>& members) {
  for (size_t i = 0; i < N; ++i) visit_member(visitor, name + "." + std::to_string(i), members[i]);
}
template <class T>
void visit_member(MemberVisitor& visitor, const std::string& name, std::map<std::string, T>& members) {
  for (auto& [key, member] : members) visit_member(visitor, name + "." + key, member);
}
template <class T>
void visit_member(MemberVisitor& visitor, const std::string& name, std::optional<T>& member) {
  if (member) visit_member(visitor, name, *member);
}
template <class T>
void visit_member(MemberVisitor& visitor, const std::string& name, std::unique_ptr<T>& member) {
  if (member) visit_member(visitor, name, *member);
}
template <class T>
void visit_member(MemberVisitor& visitor, const std::string& name, std::shared_ptr<T>& member) {
  if (!member) return;
  const auto copy = [&]() -> std::shared_ptr<void> {
    if constexpr (std::is_copy_constructible_v<T> && !std::is_abstract_v<T>) {
      if (typeid(*member) == typeid(T)) return std::make_shared<T>(*member);
    }
    throw StateError(concat("[clone] cannot copy a member behind a shared_ptr to its base class ", typeid(T).name(),
                            "; hold it by its own type"));
  };
  if (std::shared_ptr<void> replacement = visitor.shared(member.get(), copy)) {
    member = std::static_pointer_cast<T>(replacement);
  }
  visit_member(visitor, name, *member);
}

}  // namespace chorale::nn
