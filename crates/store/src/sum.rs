//! An exact sum of floats, which is rounded once when it is read.
//!
//! Adding floats rounds at each step, so the result depends on their order, and subtracting a number does not restore the earlier
//! sum. This sum keeps all bits: it is a fixed-point number wide enough for every float, and only its used digits are stored. The
//! result does not depend on the order of the numbers, and subtracting a number is the exact opposite of adding it.

use std::ops::RangeInclusive;

/// An exact sum of floats.
#[derive(Debug, Clone, Default)]
pub struct Sum {
    /// The sum of integers below 2^53, which are the common case.
    integers: i128,
    /// The sum of all other numbers: digits of 32 bits, least significant first. A digit can exceed 32 bits until it is carried.
    digits: Vec<i64>,
    /// The index of the first stored digit. Digit 0 has the least significant bits of the smallest float.
    first: usize,
    /// The number of additions since the last carry.
    uncarried: u32,
}

/// Bits per digit.
const DIGIT_BITS: usize = 32;
/// Number of digits of the largest possible sum: enough for the exponents of all floats, and for the number of additions.
const MAX_DIGITS: usize = (1024 + 1074) / DIGIT_BITS + 4;
/// The index of the bit with value 1.
const ONE_BIT: usize = 1074;
/// 2^53: integers below it are exact floats.
const MAX_EXACT_INTEGER: f64 = 9_007_199_254_740_992.0;

impl Sum {
    /// Adds a finite number. Other numbers are ignored.
    pub fn add(&mut self, number: f64) {
        self.change(number, 1);
    }

    /// Subtracts a number that was added.
    pub fn subtract(&mut self, number: f64) {
        self.change(number, -1);
    }

    /// Returns the sum, rounded to the nearest float, ties to even. A sum beyond the largest float is infinite.
    pub fn total(&self) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "the result is rounded")]
        if self.digits.iter().all(|digit| *digit == 0) {
            return self.integers as f64;
        }
        let mut digits = [0; MAX_DIGITS];
        digits[self.first..self.first + self.digits.len()].copy_from_slice(&self.digits);
        let sign = if self.integers < 0 { -1 } else { 1 };
        for index in 0..4 {
            #[expect(clippy::cast_possible_truncation, reason = "it is split into digits")]
            let part = (self.integers.unsigned_abs() >> (index * DIGIT_BITS)) as u32;
            spread(u64::from(part), ONE_BIT + index * DIGIT_BITS, |index, part| digits[index] += sign * part);
        }
        let mut is_negative = false;
        if carry(&mut digits) < 0 {
            is_negative = true;
            for digit in &mut digits {
                *digit = -*digit;
            }
            carry(&mut digits);
        }
        let rounded = round(&digits);
        if is_negative { -rounded } else { rounded }
    }

    /// Adds the number multiplied by the sign, which is 1 or -1.
    fn change(&mut self, number: f64, sign: i64) {
        #[expect(clippy::cast_possible_truncation, reason = "an integer below 2^53 is exact")]
        if number.fract() == 0.0 && number.abs() < MAX_EXACT_INTEGER {
            self.integers += i128::from(sign) * number as i128;
            return;
        }
        let bits = number.to_bits();
        let (exponent, fraction) = ((bits >> 52 & 0x7ff) as usize, bits & ((1 << 52) - 1));
        if exponent == 0x7ff {
            return;
        }
        // Subnormal floats have no implicit leading bit, and the exponent of the smallest normal floats.
        let (mantissa, index) = if exponent == 0 { (fraction, 0) } else { (fraction | 1 << 52, exponent - 1) };
        let sign = if number < 0.0 { -sign } else { sign };
        self.extend_to(index / DIGIT_BITS..=index / DIGIT_BITS + 2);
        spread(mantissa, index, |index, part| self.digits[index - self.first] += sign * part);
        self.uncarried += 1;
        if self.uncarried == 1 << 30 {
            self.uncarried = 0;
            self.extend_to(self.first..=(self.first + self.digits.len() + 1).min(MAX_DIGITS - 1));
            let over = carry(&mut self.digits);
            // The last digit keeps the sign of a negative sum.
            if let Some(last) = self.digits.last_mut() {
                *last += over << DIGIT_BITS;
            }
        }
    }

    /// Extends the digits to cover these indexes.
    fn extend_to(&mut self, indexes: RangeInclusive<usize>) {
        if self.digits.is_empty() {
            self.first = *indexes.start();
        }
        let before = self.first.saturating_sub(*indexes.start());
        self.digits.splice(..0, std::iter::repeat_n(0, before));
        self.first -= before;
        let len = (indexes.end() + 1).saturating_sub(self.first);
        self.digits.resize(len.max(self.digits.len()), 0);
    }
}

/// Splits up to 64 bits at a bit offset into digits.
fn spread(bits: u64, index: usize, mut add: impl FnMut(usize, i64)) {
    let shifted = u128::from(bits) << (index % DIGIT_BITS);
    for digit in 0..3 {
        #[expect(clippy::cast_possible_truncation, reason = "it is split into digits")]
        let part = (shifted >> (digit * DIGIT_BITS)) as u32;
        add(index / DIGIT_BITS + digit, i64::from(part));
    }
}

/// Carries the excess bits of each digit to the next one. Returns the carry out of the last digit, negative for a negative sum.
fn carry(digits: &mut [i64]) -> i64 {
    let mut over = 0;
    for digit in digits {
        let value = *digit + over;
        *digit = value & 0xffff_ffff;
        over = value >> DIGIT_BITS;
    }
    over
}

/// Rounds carried digits to the nearest float.
fn round(digits: &[i64; MAX_DIGITS]) -> f64 {
    let bit = |index: usize| digits[index / DIGIT_BITS] >> (index % DIGIT_BITS) & 1 == 1;
    let Some(last) = digits.iter().rposition(|digit| *digit != 0) else { return 0.0 };
    let top = last * DIGIT_BITS + 63 - digits[last].leading_zeros() as usize;
    let lowest = top.saturating_sub(52);
    let mut mantissa = (lowest..=top).rev().fold(0_u64, |bits, index| bits << 1 | u64::from(bit(index)));
    if lowest == 0 {
        // A subnormal float, whose bits are the mantissa.
        return f64::from_bits(mantissa);
    }
    let is_half = bit(lowest - 1);
    let is_above_half = || (0..lowest - 1).rev().any(bit);
    if is_half && (mantissa & 1 == 1 || is_above_half()) {
        mantissa += 1;
    }
    // If rounding overflows the mantissa, the carry increments the exponent.
    let bits = ((lowest as u64) << 52) + mantissa;
    if bits >= f64::INFINITY.to_bits() { f64::INFINITY } else { f64::from_bits(bits) }
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "the sums are exact")]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn added(numbers: &[f64]) -> Sum {
        let mut sum = Sum::default();
        for number in numbers {
            sum.add(*number);
        }
        sum
    }

    fn sum(numbers: &[f64]) -> f64 {
        added(numbers).total()
    }

    fn number() -> impl Strategy<Value = f64> {
        prop_oneof![
            any::<f64>().prop_filter("finite", |number| number.is_finite()),
            -10.0..10.0_f64,
            (-1000..1000_i32).prop_map(|cents| f64::from(cents) / 100.0),
            (-5..5_i32).prop_map(f64::from),
            prop::sample::select(vec![f64::MIN_POSITIVE, 5e-324, -5e-324, 9_007_199_254_740_993.0, 1e300, 0.5]),
        ]
    }

    #[test]
    fn sum_is_exact_and_rounded_once() {
        assert_eq!(sum(&[]).to_bits(), 0);
        assert_eq!(sum(&[0.1; 10]), 1.0);
        assert_eq!(sum(&[1e300, 1.0, -1e300]), 1.0);
        assert_eq!(sum(&[1e300, 0.1, -1e300]), 0.1);
        assert_eq!(sum(&[1e308, 1e308, -1e308]), 1e308);
        assert_eq!(sum(&[1e308, 1e308]), f64::INFINITY);
        assert_eq!(sum(&[-1e308, -1e308]), f64::NEG_INFINITY);
        assert_eq!(sum(&[f64::MAX, -f64::MAX, -5e-324]), -5e-324);
        // Ties are rounded to even.
        assert_eq!(sum(&[9_007_199_254_740_992.0, 0.5, 0.5]), 9_007_199_254_740_992.0);
        assert_eq!(sum(&[9_007_199_254_740_994.0, 0.5, 0.5]), 9_007_199_254_740_996.0);
        assert_eq!(sum(&[9_007_199_254_740_992.0, 0.5, 0.5, 5e-324]), 9_007_199_254_740_994.0);
        assert_eq!(sum(&[0.1, 0.2]), 0.1 + 0.2);
    }

    proptest! {
        /// An IEEE addition is also rounded once.
        #[test]
        fn sum_of_two_equals_float_addition(one in number(), two in number()) {
            prop_assert_eq!(sum(&[one, two]), one + two);
            prop_assert_eq!(sum(&[one]), one);
        }

        #[test]
        fn sum_is_independent_of_order_and_subtraction_is_exact(
            numbers in vec(number(), 0..20),
            others in vec(number(), 0..20),
            at in any::<prop::sample::Index>(),
        ) {
            let expected = sum(&numbers);
            let mut permuted = numbers.clone();
            permuted.rotate_left(at.index(numbers.len().max(1)).min(numbers.len()));
            permuted.reverse();
            prop_assert_eq!(sum(&permuted), expected);
            let mut changed = added(&[&others[..], &numbers].concat());
            for number in &others {
                changed.subtract(*number);
            }
            prop_assert_eq!(changed.total(), expected);
        }

        /// The carry is forced at random points.
        #[test]
        fn carrying_does_not_change_the_sum(numbers in vec((number(), any::<bool>()), 1..20)) {
            let mut carried = Sum::default();
            for (number, must_carry) in &numbers {
                if *must_carry {
                    carried.uncarried = (1 << 30) - 1;
                }
                carried.add(*number);
            }
            let numbers: Vec<f64> = numbers.into_iter().map(|(number, _)| number).collect();
            prop_assert_eq!(carried.total(), sum(&numbers));
        }
    }
}
