//! Medians with confidence intervals from order statistics, which assume no distribution.
//!
//! Each of `n` rounds falls below the true median with probability one half. So the interval from the `k+1`-th smallest to the
//! `k+1`-th largest round misses the true median only if at most `k` rounds fell on one of its sides, which happens with
//! probability `2 P(Binomial(n, 1/2) <= k)`. We use the largest `k` with at least 95 % coverage: the whole range of 7 rounds
//! (98.4 %), the 2nd to the 8th of 9 rounds (96.1 %).

use serde::Serialize;

const MIN_COVERAGE: f64 = 0.95;

/// A median over rounds, and an interval that covers the true median with at least 95 % probability.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Estimate {
    /// The median.
    pub median: f64,
    /// The lower end of the interval.
    pub low: f64,
    /// The upper end of the interval.
    pub high: f64,
}

impl Estimate {
    /// Estimates a value that was measured in several rounds. With fewer than six rounds the interval is their range and covers less
    /// than 95 %. Without rounds, all fields are NaN.
    pub fn of(rounds: &[f64]) -> Self {
        let mut sorted = rounds.to_vec();
        sorted.sort_by(f64::total_cmp);
        let Some(last) = sorted.len().checked_sub(1) else {
            return Self { median: f64::NAN, low: f64::NAN, high: f64::NAN };
        };
        let (excluded, _) = excluded_ranks(sorted.len());
        Self {
            median: f64::midpoint(sorted[last / 2], sorted[last.div_ceil(2)]),
            low: sorted[excluded],
            high: sorted[last - excluded],
        }
    }

    /// Estimates the ratio of two values that were measured in the same rounds.
    pub fn of_ratio(rounds: &[f64], baseline: &[f64]) -> Self {
        let ratios: Vec<f64> = rounds.iter().zip(baseline).map(|(value, base)| value / base).collect();
        Self::of(&ratios)
    }

    /// Formats the estimate, with each number formatted by `print`.
    pub(crate) fn format_value(self, print: impl FnMut(f64) -> String) -> String {
        let [median, low, high] = [self.median, self.low, self.high].map(print);
        format!("{median} ({low} to {high})")
    }
}

/// Returns the probability that the interval over this number of rounds covers the true median.
pub(crate) fn coverage(rounds: usize) -> f64 {
    excluded_ranks(rounds).1
}

/// Returns how many rounds the interval excludes at each end, and its coverage.
fn excluded_ranks(rounds: usize) -> (usize, f64) {
    // The probability that exactly `k` rounds fall on one side, and the coverage if `k` ranks are excluded.
    let mut exactly = 0.5_f64.powf(rounds as f64);
    let mut coverage = 1.0 - 2.0 * exactly;
    for k in 0.. {
        exactly *= (rounds - k) as f64 / (k + 1) as f64;
        let narrower = coverage - 2.0 * exactly;
        if narrower < MIN_COVERAGE {
            return (k, coverage);
        }
        coverage = narrower;
    }
    unreachable!("the coverage falls below any bound before the ends meet")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_and_coverage_match_the_sign_test() {
        // From a table of the binomial distribution: rounds, ranks excluded at each end, coverage in percent.
        for (rounds, expected, percent) in
            [(6, 0, 96.88), (7, 0, 98.44), (8, 0, 99.22), (9, 1, 96.09), (11, 1, 98.83), (12, 2, 96.14), (20, 5, 95.86)]
        {
            let (excluded, coverage) = excluded_ranks(rounds);
            assert_eq!(excluded, expected, "{rounds} rounds");
            assert!((coverage * 100.0 - percent).abs() < 0.005, "{rounds} rounds: {coverage}");
        }
        assert_eq!(excluded_ranks(100).0, 39);
        assert_eq!(excluded_ranks(1000).0, 468);
    }

    #[test]
    fn nine_rounds_ignore_one_outlier_on_each_side() {
        let estimate = Estimate::of(&[5.0, 900.0, 3.0, 4.0, 6.0, 0.001, 7.0, 8.0, 9.0]);
        assert_eq!(estimate, Estimate { median: 6.0, low: 3.0, high: 9.0 });
    }

    #[test]
    fn median_of_an_even_number_is_a_midpoint() {
        let estimate = Estimate::of(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]);
        assert_eq!(estimate, Estimate { median: 4.5, low: 1.0, high: 8.0 });
    }

    #[test]
    fn interval_of_few_rounds_is_their_range() {
        assert_eq!(Estimate::of(&[2.0]), Estimate { median: 2.0, low: 2.0, high: 2.0 });
        assert_eq!(Estimate::of(&[3.0, 1.0]), Estimate { median: 2.0, low: 1.0, high: 3.0 });
        assert!(Estimate::of(&[]).median.is_nan());
    }

    #[test]
    fn drift_of_the_machine_cancels_in_a_ratio() {
        let baseline = [100.0, 90.0, 80.0, 70.0, 60.0, 50.0, 40.0];
        let twice = baseline.map(|value| 2.0 * value);
        assert_eq!(Estimate::of_ratio(&twice, &baseline), Estimate { median: 2.0, low: 2.0, high: 2.0 });
    }
}
