#include "chorale/app/entry.h"
#include "chorale/base/descriptors.h"

int main(int argc, char** argv) {
  chorale::open_standard_descriptors();
  return chorale::app::run_chorale(argc, argv);
}
