# Each examples/NAME.cc is a program and a test: it succeeds when it exits with 0. One whose first comment says how to start
# its ranks, `chorale run -n 2 ./NAME` or `mpirun -n 2 ./NAME`, is started so.
find_program(CHORALE_MPIRUN mpirun)
file(GLOB examples CONFIGURE_DEPENDS "${CMAKE_SOURCE_DIR}/examples/*.cc")
foreach(path IN LISTS examples)
  cmake_path(GET path STEM name)
  add_executable(example_${name} "${path}")
  target_link_libraries(example_${name} PRIVATE chorale)
  set_target_properties(example_${name} PROPERTIES OUTPUT_NAME ${name}
    RUNTIME_OUTPUT_DIRECTORY "${CMAKE_RUNTIME_OUTPUT_DIRECTORY}/examples")

  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${path}")  # for its first comment
  file(STRINGS "${path}" started REGEX "^// +(chorale|mpirun) .*\\./${name}$" LIMIT_COUNT 1)
  string(REGEX REPLACE "^// +(.*)\\./${name}$" "\\1" launcher "${started}")
  separate_arguments(launcher UNIX_COMMAND "${launcher}")
  list(TRANSFORM launcher REPLACE "^chorale$" "$<TARGET_FILE:chorale_program>")
  add_test(NAME examples.${name} COMMAND ${launcher} $<TARGET_FILE:example_${name}>)
  # One thread: threads of several tests that spin for one core make each other slow. As root, as in containers, and on
  # machines with fewer cores than ranks: Open MPI wants to be told.
  set_tests_properties(examples.${name} PROPERTIES TIMEOUT 60 LABELS examples ENVIRONMENT
    "OMP_NUM_THREADS=1;OMPI_ALLOW_RUN_AS_ROOT=1;OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1;OMPI_MCA_rmaps_base_oversubscribe=1")
  if(launcher MATCHES "^mpirun" AND NOT CHORALE_MPIRUN)
    set_tests_properties(examples.${name} PROPERTIES DISABLED ON)
  endif()
endforeach()
