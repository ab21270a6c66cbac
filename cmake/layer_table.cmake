# The layers, from the bottom up (docs/dev/style.md, section 1). A layer may include the headers of its DEPS and of what
# those may include; tools/layers compares every #include with this table.
chorale_layer(base)
# Vector loops are useless without inlining: at -O1 the tests of all layers above would wait for them. No contraction: a
# multiplication and an addition must round alike in the body of a loop and in its tail.
chorale_layer(vec OPTIONS -O3 -ffp-contract=off DEPS base)
chorale_layer(device DEPS base)
chorale_layer(tensor DEPS device)
chorale_layer(io DEPS tensor)
chorale_layer(text DEPS io)
chorale_layer(transport DEPS device)
chorale_layer(kernel DEPS tensor vec)
chorale_layer(comm DEPS transport tensor vec)
chorale_layer(reducer DEPS comm)
chorale_layer(op DEPS kernel TEST_DEPS autograd)
chorale_layer(eager DEPS op)
chorale_layer(autograd DEPS op)
chorale_layer(autocast DEPS autograd TEST_DEPS api)
chorale_layer(api DEPS eager autocast)
chorale_layer(optim DEPS api)
chorale_layer(nn DEPS api)
chorale_layer(data DEPS api io)
chorale_layer(models DEPS nn TEST_DEPS optim)
chorale_layer(app PROGRAM chorale DEPS ALL)
