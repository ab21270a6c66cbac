# cmake --install: the program, the library in both forms, the headers that chorale/chorale.h reaches, a CMake package and
# a pkg-config file. The folders are fixed, since the program looks for modules in ../lib/chorale.
include(CMakePackageConfigHelpers)

# Before 1.0 a minor version may change the interface.
set_target_properties(chorale_shared PROPERTIES VERSION ${PROJECT_VERSION}
  SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
foreach(form shared static)
  set_target_properties(chorale_${form} PROPERTIES EXPORT_NAME ${form})
  target_compile_features(chorale_${form} INTERFACE cxx_std_20)
endforeach()
target_link_libraries(chorale_static INTERFACE "$<INSTALL_INTERFACE:${CHORALE_LINK_NAMES}>")

# ./chorale builds what the command at hand needs, and nobody builds the shared library for it: what is missing is built
# before anything is installed.
get_property(programs GLOBAL PROPERTY CHORALE_PROGRAMS)
install(CODE "execute_process(COMMAND \"${CMAKE_COMMAND}\" --build \"${CMAKE_BINARY_DIR}\" --target
  chorale_shared chorale_static ${programs} COMMAND_ERROR_IS_FATAL ANY)")
install(TARGETS chorale_shared chorale_static EXPORT chorale
  LIBRARY DESTINATION lib ARCHIVE DESTINATION lib INCLUDES DESTINATION include)
if(programs)
  install(TARGETS ${programs} EXPORT chorale RUNTIME DESTINATION bin)
endif()
install(DIRECTORY "${CMAKE_LIBRARY_OUTPUT_DIRECTORY}/" DESTINATION lib/chorale FILES_MATCHING PATTERN "chorale_*.so")
install(CODE "set(CHORALE_SOURCES \"${CMAKE_SOURCE_DIR}/src\")")
install(SCRIPT "${CMAKE_CURRENT_LIST_DIR}/install_headers.cmake")

set(package_folder lib/cmake/chorale)
install(EXPORT chorale NAMESPACE chorale:: FILE choraleTargets.cmake DESTINATION ${package_folder})
configure_package_config_file("${CMAKE_CURRENT_LIST_DIR}/choraleConfig.cmake.in" choraleConfig.cmake
  INSTALL_DESTINATION ${package_folder} NO_SET_AND_CHECK_MACRO NO_CHECK_REQUIRED_COMPONENTS_MACRO)
write_basic_package_version_file(choraleConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES "${CMAKE_CURRENT_BINARY_DIR}/choraleConfig.cmake" "${CMAKE_CURRENT_BINARY_DIR}/choraleConfigVersion.cmake"
  DESTINATION ${package_folder})

list(TRANSFORM CHORALE_LINK_NAMES PREPEND "-l" OUTPUT_VARIABLE link_flags)
string(JOIN " " CHORALE_LINK_FLAGS ${link_flags})
configure_file("${CMAKE_CURRENT_LIST_DIR}/chorale.pc.in" chorale.pc @ONLY)
install(FILES "${CMAKE_CURRENT_BINARY_DIR}/chorale.pc" DESTINATION lib/pkgconfig)
install(FILES LICENSE DESTINATION share/doc/chorale)
