# Everything from outside; docs/dev/dependencies.md says why each one is here.
find_package(Threads REQUIRED)
find_package(OpenMP REQUIRED)
find_package(fmt REQUIRED)
find_package(spdlog REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(CLI11 REQUIRED)
find_package(OpenSSL REQUIRED COMPONENTS Crypto SSL)
find_package(ZLIB REQUIRED)
# oneDNN's CMake package asks for OpenCL's headers, on behalf of a GPU engine that we do not use.
find_library(CHORALE_DNNL dnnl REQUIRED)
find_library(CHORALE_HWY hwy REQUIRED)
find_library(CHORALE_SLEEF sleef REQUIRED)
find_library(CHORALE_DW dw REQUIRED)
find_library(CHORALE_HWLOC hwloc REQUIRED)
find_library(CHORALE_IPSEC_MB IPSec_MB REQUIRED)
# OpenBLAS is not linked: it is loaded at first use (kernel/cpu/blas/openblas.cc says why).
# Only the program needs it. Its flags must be those that Debian's library was compiled with, which pkg-config knows.
find_package(PkgConfig REQUIRED)
pkg_check_modules(cpp_httplib REQUIRED IMPORTED_TARGET cpp-httplib)

add_library(chorale_third_party INTERFACE)
target_link_libraries(chorale_third_party INTERFACE
  OpenMP::OpenMP_CXX Threads::Threads
  "${CHORALE_DNNL}" "${CHORALE_HWY}" "${CHORALE_SLEEF}"
  fmt::fmt spdlog::spdlog nlohmann_json::nlohmann_json ZLIB::ZLIB
  OpenSSL::SSL OpenSSL::Crypto "${CHORALE_IPSEC_MB}" "${CHORALE_HWLOC}" "${CHORALE_DW}" ${CMAKE_DL_LIBS})
# The same as the linker's names, for programs that link the installed static library (cmake/package.cmake).
set(CHORALE_LINK_NAMES dnnl hwy sleef fmt spdlog z ssl crypto IPSec_MB hwloc dw ${OpenMP_CXX_LIB_NAMES} ${CMAKE_DL_LIBS})

# What a module needs, as chorale_NAME_library; without it the module is not built.
function(chorale_module_library name header library)
  find_path(CHORALE_${name}_INCLUDE ${header} PATH_SUFFIXES openmpi/include
    HINTS /usr/lib/${CMAKE_LIBRARY_ARCHITECTURE})
  find_library(CHORALE_${name}_LIBRARY ${library})
  if(CHORALE_${name}_INCLUDE AND CHORALE_${name}_LIBRARY)
    add_library(chorale_${name}_library INTERFACE)
    target_include_directories(chorale_${name}_library SYSTEM INTERFACE "${CHORALE_${name}_INCLUDE}")
    target_link_libraries(chorale_${name}_library INTERFACE "${CHORALE_${name}_LIBRARY}")
  endif()
endfunction()
chorale_module_library(mpi mpi.h mpi)
chorale_module_library(ucx ucp/api/ucp.h ucp)

if(CHORALE_TESTS)
  find_package(GTest REQUIRED)
endif()
