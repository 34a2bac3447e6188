//! A sum of numbers that is exact until it is read, and rounded once.
//!
//! Adding floats one after the other rounds at every step, so the sum depends on their order, and a number that was added cannot
//! be subtracted again. This sum keeps all bits: it is a fixed-point number wide enough for every float, of which only the used
//! part is stored. So the sum is the same in any order, and maintaining it gives the same result as adding all numbers again.

use std::ops::RangeInclusive;

/// A sum of numbers.
#[derive(Debug, Clone, Default)]
pub struct Sum {
    /// Whole numbers that a float has exactly: most are, and they need no more.
    integers: i128,
    /// The sum of all others: digits of 32 bits, the least first. A digit takes more than it holds until it is carried over.
    digits: Vec<i64>,
    /// The place of the first digit, counted from that of the least float.
    first: usize,
    /// How many numbers have been added since digits were carried over.
    uncarried: u32,
}

/// The bits of a digit.
const DIGIT_BITS: usize = 32;
/// The digits that the greatest sum takes that can be reached: those of the greatest float, and of as many as can be counted.
const MAX_DIGITS: usize = (1024 + 1074) / DIGIT_BITS + 4;
/// The place of the bit that is one.
const ONE_BIT: usize = 1074;
/// From here on floats have no fraction, and not every whole number is one.
const MAX_EXACT_INTEGER: f64 = 9_007_199_254_740_992.0;

impl Sum {
    /// Adds a number, which must be finite.
    pub fn add(&mut self, number: f64) {
        self.change(number, 1);
    }

    /// Takes a number away that was added.
    pub fn subtract(&mut self, number: f64) {
        self.change(number, -1);
    }

    /// The sum, rounded to the nearest float, to the even one of two. What is beyond all floats is infinite.
    pub fn total(&self) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "that is the rounding")]
        if self.digits.iter().all(|digit| *digit == 0) {
            return self.integers as f64;
        }
        let mut digits = [0; MAX_DIGITS];
        digits[self.first..self.first + self.digits.len()].copy_from_slice(&self.digits);
        let sign = if self.integers < 0 { -1 } else { 1 };
        for place in 0..4 {
            #[expect(clippy::cast_possible_truncation, reason = "it is cut in digits")]
            let part = (self.integers.unsigned_abs() >> (place * DIGIT_BITS)) as u32;
            spread(u64::from(part), ONE_BIT + place * DIGIT_BITS, |place, part| digits[place] += sign * part);
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

    fn change(&mut self, number: f64, sign: i64) {
        #[expect(clippy::cast_possible_truncation, reason = "what has no fraction and is below 2^53 is whole")]
        if number.fract() == 0.0 && number.abs() < MAX_EXACT_INTEGER {
            self.integers += i128::from(sign) * number as i128;
            return;
        }
        let bits = number.to_bits();
        let (exponent, fraction) = ((bits >> 52 & 0x7ff) as usize, bits & ((1 << 52) - 1));
        if exponent == 0x7ff {
            return;
        }
        // The smallest floats have no leading one, and begin where the next ones do.
        let (mantissa, place) = if exponent == 0 { (fraction, 0) } else { (fraction | 1 << 52, exponent - 1) };
        let sign = if number < 0.0 { -sign } else { sign };
        self.extend_to(place / DIGIT_BITS..=place / DIGIT_BITS + 2);
        spread(mantissa, place, |place, part| self.digits[place - self.first] += sign * part);
        self.uncarried += 1;
        if self.uncarried == 1 << 30 {
            self.uncarried = 0;
            self.extend_to(self.first..=(self.first + self.digits.len() + 1).min(MAX_DIGITS - 1));
            let over = carry(&mut self.digits);
            // A negative sum has all higher digits below zero; one that is takes them all.
            if let Some(last) = self.digits.last_mut() {
                *last += over << DIGIT_BITS;
            }
        }
    }

    /// Makes room for digits at these places.
    fn extend_to(&mut self, places: RangeInclusive<usize>) {
        if self.digits.is_empty() {
            self.first = *places.start();
        }
        let before = self.first.saturating_sub(*places.start());
        self.digits.splice(..0, std::iter::repeat_n(0, before));
        self.first -= before;
        let len = (places.end() + 1).saturating_sub(self.first);
        self.digits.resize(len.max(self.digits.len()), 0);
    }
}

/// Cuts up to 64 bits at a place in digits.
fn spread(bits: u64, place: usize, mut add: impl FnMut(usize, i64)) {
    let shifted = u128::from(bits) << (place % DIGIT_BITS);
    for digit in 0..3 {
        #[expect(clippy::cast_possible_truncation, reason = "it is cut in digits")]
        let part = (shifted >> (digit * DIGIT_BITS)) as u32;
        add(place / DIGIT_BITS + digit, i64::from(part));
    }
}

/// Carries over what digits hold beyond their bits. Returns what is left beyond the last, which is negative if all of it is.
fn carry(digits: &mut [i64]) -> i64 {
    let mut over = 0;
    for digit in digits {
        let value = *digit + over;
        *digit = value & 0xffff_ffff;
        over = value >> DIGIT_BITS;
    }
    over
}

/// The float that is nearest to digits that are all carried over.
fn round(digits: &[i64; MAX_DIGITS]) -> f64 {
    let bit = |place: usize| digits[place / DIGIT_BITS] >> (place % DIGIT_BITS) & 1 == 1;
    let Some(last) = digits.iter().rposition(|digit| *digit != 0) else { return 0.0 };
    let top = last * DIGIT_BITS + 63 - digits[last].leading_zeros() as usize;
    let lowest = top.saturating_sub(52);
    let mut mantissa = (lowest..=top).rev().fold(0_u64, |bits, place| bits << 1 | u64::from(bit(place)));
    if lowest == 0 {
        // As many bits as the smallest floats have, which are written as they are.
        return f64::from_bits(mantissa);
    }
    let is_half = bit(lowest - 1);
    let is_more = || (0..lowest - 1).rev().any(bit);
    if is_half && (mantissa & 1 == 1 || is_more()) {
        mantissa += 1;
    }
    // A one that was carried over makes the next exponent, with all bits zero.
    let bits = ((lowest as u64) << 52) + mantissa;
    if bits >= f64::INFINITY.to_bits() { f64::INFINITY } else { f64::from_bits(bits) }
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "exact is exact")]
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
    fn what_rounding_would_lose_is_there() {
        assert_eq!(sum(&[]).to_bits(), 0);
        assert_eq!(sum(&[0.1; 10]), 1.0);
        assert_eq!(sum(&[1e300, 1.0, -1e300]), 1.0);
        assert_eq!(sum(&[1e300, 0.1, -1e300]), 0.1);
        assert_eq!(sum(&[1e308, 1e308, -1e308]), 1e308);
        assert_eq!(sum(&[1e308, 1e308]), f64::INFINITY);
        assert_eq!(sum(&[-1e308, -1e308]), f64::NEG_INFINITY);
        assert_eq!(sum(&[f64::MAX, -f64::MAX, -5e-324]), -5e-324);
        // Halfway, to the even one; and just beyond it.
        assert_eq!(sum(&[9_007_199_254_740_992.0, 0.5, 0.5]), 9_007_199_254_740_992.0);
        assert_eq!(sum(&[9_007_199_254_740_994.0, 0.5, 0.5]), 9_007_199_254_740_996.0);
        assert_eq!(sum(&[9_007_199_254_740_992.0, 0.5, 0.5, 5e-324]), 9_007_199_254_740_994.0);
        assert_eq!(sum(&[0.1, 0.2]), 0.1 + 0.2);
    }

    proptest! {
        /// One addition of floats is rounded once, as this is.
        #[test]
        fn two_are_added_as_floats_are(one in number(), two in number()) {
            prop_assert_eq!(sum(&[one, two]), one + two);
            prop_assert_eq!(sum(&[one]), one);
        }

        #[test]
        fn order_makes_no_difference_and_what_is_taken_away_was_never_there(
            numbers in vec(number(), 0..20),
            others in vec(number(), 0..20),
            at in any::<prop::sample::Index>(),
        ) {
            let expected = sum(&numbers);
            let mut turned = numbers.clone();
            turned.rotate_left(at.index(numbers.len().max(1)).min(numbers.len()));
            turned.reverse();
            prop_assert_eq!(sum(&turned), expected);
            let mut changed = added(&[&others[..], &numbers].concat());
            for number in &others {
                changed.subtract(*number);
            }
            prop_assert_eq!(changed.total(), expected);
        }

        /// Whatever has been carried over.
        #[test]
        fn carrying_changes_nothing(numbers in vec((number(), any::<bool>()), 1..20)) {
            let mut carried = Sum::default();
            for (number, is_time) in &numbers {
                if *is_time {
                    carried.uncarried = (1 << 30) - 1;
                }
                carried.add(*number);
            }
            let numbers: Vec<f64> = numbers.into_iter().map(|(number, _)| number).collect();
            prop_assert_eq!(carried.total(), sum(&numbers));
        }
    }
}
