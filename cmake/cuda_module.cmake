# chorale_cuda.so: the folders cuda/ of all layers, loaded when a device cuda:N is first used (device/runtime.cc). It opens NVIDIA's
# driver and libraries itself, so it needs their headers only. Its kernels are texts (*.cu), which NVRTC compiles at run time.
# It calls functions of libchorale.so, so programs that are to use a GPU link that form of the library (BUILD_SHARED_LIBS).
# gpu_test is made of the tests in these folders. They need a GPU, so ctest does not run them; it runs the rehearsal, which compiles
# kernels without launching any (Note [Rehearsal]).
if(NOT CHORALE_CUDA OR CHORALE_SANITIZE OR CHORALE_LAYERS)
  return()
endif()
if(NOT BUILD_SHARED_LIBS)
  message(FATAL_ERROR "CHORALE_CUDA needs BUILD_SHARED_LIBS: chorale_cuda.so calls functions of libchorale.so. The preset cuda sets both.")
endif()
find_path(CHORALE_CUDA_INCLUDE cublasLt.h HINTS ENV CUDA_HOME /usr/local/cuda PATH_SUFFIXES include)
find_path(CHORALE_CUDNN_INCLUDE cudnn.h HINTS ENV CUDA_HOME /usr/local/cuda PATH_SUFFIXES include)
find_path(CHORALE_NCCL_INCLUDE nccl.h HINTS ENV CUDA_HOME /usr/local/cuda PATH_SUFFIXES include)
if(NOT CHORALE_CUDA_INCLUDE OR NOT CHORALE_CUDNN_INCLUDE OR NOT CHORALE_NCCL_INCLUDE)
  message(STATUS "Without chorale_cuda.so: the CUDA toolkit, cuDNN or NCCL is not here (chorale doctor says what to install)")
  return()
endif()

get_property(sources GLOBAL PROPERTY CHORALE_CUDA_SOURCES)
set(texts ${sources})
list(FILTER texts INCLUDE REGEX "\\.cu$")
set(tests ${sources})
list(FILTER tests INCLUDE REGEX "_test\\.cc$")
list(FILTER sources INCLUDE REGEX "\\.cc$")
set(stand_in ${sources})
list(FILTER stand_in INCLUDE REGEX "_stand_in_test_util\\.cc$")
list(FILTER sources EXCLUDE REGEX "_(test|test_util)\\.cc$")
foreach(path IN LISTS texts)
  cmake_path(GET path FILENAME file)
  set(made "${CMAKE_BINARY_DIR}/embedded/cuda/${file}.cc")
  add_custom_command(OUTPUT "${made}" DEPENDS "${path}" "${CMAKE_SOURCE_DIR}/cmake/embed_text.cmake" VERBATIM
    COMMAND "${CMAKE_COMMAND}" "-DFILE=${path}" -DNAMESPACE=chorale::cuda "-DOUT=${made}"
      -P "${CMAKE_SOURCE_DIR}/cmake/embed_text.cmake")
  list(APPEND embedded "${made}")
endforeach()
add_library(chorale_cuda_module MODULE ${sources} ${embedded})
set_target_properties(chorale_cuda_module PROPERTIES PREFIX "" OUTPUT_NAME chorale_cuda)
target_include_directories(chorale_cuda_module SYSTEM PRIVATE "${CHORALE_CUDA_INCLUDE}" "${CHORALE_CUDNN_INCLUDE}"
  "${CHORALE_NCCL_INCLUDE}")
target_link_libraries(chorale_cuda_module PRIVATE chorale)
# The module is compiled in groups in every preset, which takes a third of the time: it is built whole, and rarely.
# tools/lint needs each source by itself.
option(CHORALE_CUDA_GROUPED "Compile the sources of a folder cuda/ together" ON)
set(grouped_elsewhere ${CHORALE_GROUPED})
set(CHORALE_GROUPED ${CHORALE_CUDA_GROUPED})
chorale_group(chorale_cuda_module ${sources})
set(CHORALE_GROUPED ${grouped_elsewhere})

if(CHORALE_TESTS AND tests)
  add_executable(gpu_test ${tests})
  target_link_libraries(gpu_test PRIVATE chorale_test_util)
  add_dependencies(gpu_test chorale_cuda_module)
  # What NCCL is in the rehearsal: the linker's folders are asked first.
  add_library(nccl_stand_in MODULE ${stand_in})
  set_target_properties(nccl_stand_in PROPERTIES PREFIX "" SUFFIX "" OUTPUT_NAME libnccl.so.2
    LIBRARY_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/stand_in")
  target_include_directories(nccl_stand_in SYSTEM PRIVATE "${CHORALE_CUDA_INCLUDE}" "${CHORALE_NCCL_INCLUDE}")
  target_link_libraries(nccl_stand_in PRIVATE chorale)
  add_dependencies(gpu_test nccl_stand_in)
  add_test(NAME gpu.rehearsal COMMAND gpu_test)
  set_tests_properties(gpu.rehearsal PROPERTIES TIMEOUT 300 LABELS gpu
    ENVIRONMENT
    "CHORALE_CUDA_REHEARSAL=1;CHORALE_CACHE_DIR=${CMAKE_BINARY_DIR}/rehearsal;GTEST_BRIEF=1;LD_LIBRARY_PATH=${CMAKE_BINARY_DIR}/stand_in")
endif()
