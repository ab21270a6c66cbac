// The files in page/, as text; the build makes their definitions.
#pragma once

#include <string_view>

namespace chorale::report {

extern const std::string_view kPageHtml;  // with marks where the others and the data go
extern const std::string_view kPageCss;
extern const std::string_view kPlotJs;  // draws plots; knows nothing of runs
extern const std::string_view kPageJs;  // draws the page, and again when new data comes

}  // namespace chorale::report
