# The layers, from the bottom up (docs/dev/style.md, section 1). A layer may include the headers of its DEPS and of what
# those may include; tools/layers compares every #include with this table.
# Layers without loops of their own, whose work the others do, are optimised less, so that the first build of the
# program is shorter.
set(lightly "$<$<CONFIG:Release>:-O1>")
chorale_layer(base)
chorale_layer(json OPTIONS ${lightly} DEPS base)
chorale_layer(trace DEPS base TEST_DEPS json)
# What tests of every layer use: the main function with its watchdog, folders that vanish, fuzzing.
chorale_layer(testing DEPS base)
# Pointwise loops are written out in vectors: -O2 compiles them a quarter faster and `bench ops` finds no difference. Reductions and random
# numbers lose up to a half by it.
file(GLOB pointwise "${CMAKE_SOURCE_DIR}/src/chorale/vec/pointwise_*.cc")
list(FILTER pointwise EXCLUDE REGEX "_test\\.cc$")
set_source_files_properties(${pointwise} PROPERTIES COMPILE_OPTIONS -O2)
# Vector loops are useless without inlining: at -O1 the tests of all layers above would wait for them. No contraction: a
# multiplication and an addition must round alike in the body of a loop and in its tail.
chorale_layer(vec OPTIONS -O3 -ffp-contract=off DEPS base)
chorale_layer(device DEPS vec)
chorale_layer(tensor DEPS device)
chorale_layer(io DEPS tensor json)
chorale_layer(text DEPS io)
chorale_layer(report OPTIONS ${lightly} DEPS io)
chorale_layer(transport DEPS device)
chorale_layer(launch OPTIONS ${lightly} DEPS transport json)
chorale_layer(kernel DEPS tensor vec)
chorale_layer(comm DEPS transport tensor vec trace)
chorale_layer(reducer DEPS comm)
chorale_layer(op DEPS kernel comm TEST_DEPS autograd)
chorale_layer(eager DEPS op)
chorale_layer(autograd DEPS op trace)
chorale_layer(autocast DEPS autograd TEST_DEPS api)
chorale_layer(sharding DEPS autograd TEST_DEPS api)
chorale_layer(graph DEPS op TEST_DEPS api)
chorale_layer(codegen OPTIONS ${lightly} DEPS graph io TEST_DEPS api)
chorale_layer(api TABLES Ops/Table Ops/TableGradient Ops/ShardedTable Rows/TracedTable Rows/SimTable Rows/AutocastTable
  DEPS eager autocast sharding graph)
chorale_layer(snapshot OPTIONS ${lightly} DEPS api io comm)
chorale_layer(optim DEPS api)
chorale_layer(nn DEPS api)
chorale_layer(zero DEPS optim reducer TEST_DEPS parallel)
chorale_layer(data DEPS api io)
chorale_layer(parallel DEPS nn optim data reducer TEST_DEPS models codegen)
chorale_layer(elastic OPTIONS ${lightly} DEPS parallel snapshot TEST_DEPS launch models fsdp)
chorale_layer(fsdp DEPS nn TEST_DEPS parallel models snapshot optim zero codegen)
chorale_layer(dist_autograd DEPS api)
chorale_layer(rpc DEPS dist_autograd nn optim comm TEST_DEPS parallel)
chorale_layer(models OPTIONS ${lightly} DEPS nn io TEST_DEPS optim codegen)
chorale_layer(train OPTIONS ${lightly} DEPS parallel models text report codegen snapshot)
# Layers that training does not need stay out of LINKS, so that the first build need not wait for them: a command that needs
# one is a program of its own, a folder with a main.cc.
chorale_layer(app PROGRAM chorale USES elastic:sharded LINKS train launch OPTIONS ${lightly} LIBRARIES PkgConfig::cpp_httplib DEPS ALL)
