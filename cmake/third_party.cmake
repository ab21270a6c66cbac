# Everything from outside; docs/dev/dependencies.md says why each one is here.
find_package(Threads REQUIRED)
find_package(OpenMP REQUIRED)
find_package(fmt REQUIRED)
find_package(spdlog REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(CLI11 REQUIRED)
# Not through its CMake package, which asks for OpenCL's headers on behalf of a GPU engine that we do not use.
find_library(CHORALE_DNNL dnnl REQUIRED)
find_library(CHORALE_HWY hwy REQUIRED)
find_library(CHORALE_SLEEF sleef REQUIRED)
find_library(CHORALE_DW dw REQUIRED)

# The flavour that shares OpenMP's threads, whatever the system's default libopenblas is; the rpath makes sure at run time.
set(openblas_flavour "${CMAKE_LIBRARY_ARCHITECTURE}/openblas-openmp")
find_library(CHORALE_OPENBLAS openblas PATHS "/usr/lib/${openblas_flavour}" NO_DEFAULT_PATH REQUIRED)
find_path(CHORALE_OPENBLAS_INCLUDE cblas.h PATHS "/usr/include/${openblas_flavour}" NO_DEFAULT_PATH REQUIRED)
list(APPEND CMAKE_BUILD_RPATH "/usr/lib/${openblas_flavour}")

add_library(chorale_third_party INTERFACE)
target_include_directories(chorale_third_party SYSTEM INTERFACE "${CHORALE_OPENBLAS_INCLUDE}")
target_link_libraries(chorale_third_party INTERFACE
  OpenMP::OpenMP_CXX Threads::Threads
  "${CHORALE_DNNL}" "${CHORALE_OPENBLAS}" "${CHORALE_HWY}" "${CHORALE_SLEEF}"
  fmt::fmt spdlog::spdlog nlohmann_json::nlohmann_json
  "${CHORALE_DW}" ${CMAKE_DL_LIBS})

if(CHORALE_TESTS)
  find_package(GTest REQUIRED)
endif()
