#include "chorale/app/program.h"

int main(int argc, char** argv) { return chorale::app::run(argc, argv); }
