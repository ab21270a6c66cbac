#include "chorale/report/series.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>

namespace chorale::report {
namespace {

using testing::ElementsAre;
using testing::IsNan;

constexpr std::array<std::string_view, 2> kFields = {"step", "loss"};

Series series_of(const std::vector<std::array<double, 2>>& rows) {
  Series series(kFields);
  for (const auto& row : rows) series.add(row);
  return series;
}

TEST(Series, StepsThatAreDoneAgainReplaceTheOldOnes) {
  const Series series = series_of({{1, 10}, {2, 20}, {3, 30}, {4, 40}, {3, 31}});
  EXPECT_THAT(series.columns()[0].values, ElementsAre(1, 2, 3));
  EXPECT_THAT(series.columns()[1].values, ElementsAre(10, 20, 31));
}

TEST(Series, IsNotThinnedBelowTheLimit) {
  const Series thin = series_of({{1, 10}, {2, 20}}).thinned(2, "loss", "low", "high");
  EXPECT_EQ(thin.columns().size(), 2U);
  EXPECT_EQ(thin.rows(), 2U);
}

TEST(Series, ThinnedRowsAreMeansAndKeepTheExtremes) {
  const Series thin = series_of({{1, 10}, {2, 20}, {3, 0}, {4, 40}, {5, 7}}).thinned(3, "loss", "low", "high");
  ASSERT_EQ(thin.columns().size(), 4U);
  EXPECT_THAT(thin.columns()[0].values, ElementsAre(2, 4, 5));
  EXPECT_THAT(thin.columns()[1].values, ElementsAre(15, 20, 7));
  EXPECT_THAT(thin.columns()[2].values, ElementsAre(10, 0, 7));
  EXPECT_THAT(thin.columns()[3].values, ElementsAre(20, 40, 7));
}

TEST(Series, MissingValuesDoNotCountInMeans) {
  const Series thin =
      series_of({{1, kMissing}, {2, 20}, {3, kMissing}, {4, kMissing}}).thinned(2, "loss", "low", "high");
  EXPECT_THAT(thin.columns()[1].values, ElementsAre(20, IsNan()));
  EXPECT_THAT(thin.columns()[2].values, ElementsAre(20, IsNan()));
}

}  // namespace
}  // namespace chorale::report
