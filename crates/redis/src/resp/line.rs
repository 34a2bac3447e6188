//! The lines of RESP: lengths and numbers.

use super::error::DecodeErrorKind;

/// The length of a string or aggregate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Length {
    /// This number of bytes, elements or pairs. A number that does not fit is `u64::MAX`.
    Of(u64),
    /// Unknown, until its end: `?`.
    Streamed,
    /// Null: `-1`.
    Null,
}

/// Bytes of a line besides its content: the type, CR and LF.
pub(super) const LINE_OVERHEAD: usize = 3;

/// Digits that fit 64 bits without a check at each of them. No accepted length is longer.
const SHORT: usize = 18;

/// Parses a short number at the front of `input`, after the type byte. Also returns the length of the line. `None` if it is anything
/// else, or incomplete.
#[inline]
pub(super) fn short(input: &[u8]) -> Option<(u64, usize)> {
    let mut number = 0;
    for (at, &byte) in input.iter().enumerate().skip(1).take(SHORT + 1) {
        let digit = byte.wrapping_sub(b'0');
        if digit > 9 {
            let is_end = at > 1 && byte == b'\r' && input.get(at + 1) == Some(&b'\n');
            return is_end.then_some((number, at + 2));
        }
        number = number * 10 + u64::from(digit);
    }
    None
}

/// Parses a length.
pub(super) fn length(line: &[u8]) -> Option<Length> {
    match line {
        b"?" => Some(Length::Streamed),
        b"-1" => Some(Length::Null),
        _ => digits(line).map(Length::Of),
    }
}

pub(super) fn integer(line: &[u8]) -> Result<i64, DecodeErrorKind> {
    let (is_negative, rest) = signed(line);
    let size = digits(rest).ok_or(DecodeErrorKind::Integer)?;
    let integer = if is_negative { 0_i64.checked_sub_unsigned(size) } else { i64::try_from(size).ok() };
    integer.ok_or(DecodeErrorKind::IntegerRange)
}

pub(super) fn double(line: &[u8]) -> Result<f64, DecodeErrorKind> {
    let (is_negative, rest) = signed(line);
    if rest.eq_ignore_ascii_case(b"inf") {
        return Ok(if is_negative { f64::NEG_INFINITY } else { f64::INFINITY });
    }
    // The C library may write a sign before it.
    if rest.eq_ignore_ascii_case(b"nan") {
        return Ok(f64::NAN);
    }
    let is_decimal = rest.first().is_some_and(|&byte| byte == b'.' || byte.is_ascii_digit());
    let number = std::str::from_utf8(line).ok().filter(|_| is_decimal).and_then(|text| text.parse::<f64>().ok());
    number.filter(|number| number.is_finite()).ok_or(DecodeErrorKind::Double)
}

pub(super) fn is_big_number(line: &[u8]) -> bool {
    let (_, rest) = signed(line);
    !rest.is_empty() && rest.iter().all(u8::is_ascii_digit)
}

/// Returns whether there is a minus, and the text after the sign.
fn signed(line: &[u8]) -> (bool, &[u8]) {
    match line {
        [b'-', rest @ ..] => (true, rest),
        [b'+', rest @ ..] => (false, rest),
        _ => (false, line),
    }
}

/// Parses digits. A number that does not fit is `u64::MAX`.
fn digits(line: &[u8]) -> Option<u64> {
    let is_number = !line.is_empty() && line.iter().all(u8::is_ascii_digit);
    let add = |number: u64, byte: &u8| number.saturating_mul(10).saturating_add((byte - b'0').into());
    is_number.then(|| line.iter().fold(0, add))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_numbers_are_parsed_like_lines() {
        assert_eq!(short(b"$0\r\n"), Some((0, 4)));
        assert_eq!(short(b"*12\r\nrest"), Some((12, 5)));
        assert_eq!(short(b":999999999999999999\r\n"), Some((999_999_999_999_999_999, 21)));
        for other in
            [&b"$\r\n"[..], b"$-1\r\n", b"$?\r\n", b"$1", b"$1\r", b"$1\rx", b"$1\n", b":1000000000000000000\r\n"]
        {
            assert_eq!(short(other), None, "{}", other.escape_ascii());
        }
    }

    #[test]
    fn integers_have_64_bits() {
        for (line, expected) in [
            ("0", Ok(0)),
            ("-0", Ok(0)),
            ("+7", Ok(7)),
            ("0000000000000000000000012", Ok(12)),
            ("9223372036854775807", Ok(i64::MAX)),
            ("-9223372036854775808", Ok(i64::MIN)),
            ("9223372036854775808", Err(DecodeErrorKind::IntegerRange)),
            ("-9223372036854775809", Err(DecodeErrorKind::IntegerRange)),
            ("99999999999999999999", Err(DecodeErrorKind::IntegerRange)),
            ("", Err(DecodeErrorKind::Integer)),
            ("-", Err(DecodeErrorKind::Integer)),
            ("--1", Err(DecodeErrorKind::Integer)),
            ("1 ", Err(DecodeErrorKind::Integer)),
            ("1.0", Err(DecodeErrorKind::Integer)),
        ] {
            assert_eq!(integer(line.as_bytes()), expected, "{line}");
        }
    }

    #[test]
    fn doubles_are_decimal_infinite_or_nan() {
        for (line, expected) in [
            ("1.23", 1.23),
            ("10", 10.0),
            ("-1e-7", -1e-7),
            ("+1E5", 1e5),
            ("1.7976931348623157e+308", f64::MAX),
            ("inf", f64::INFINITY),
            ("-inf", f64::NEG_INFINITY),
        ] {
            assert_eq!(double(line.as_bytes()), Ok(expected), "{line}");
        }
        assert!(double(b"nan").is_ok_and(f64::is_nan) && double(b"-nan").is_ok_and(f64::is_nan));
        for line in ["", "-", "1e999", "infinity", "0x10", "1.5 ", "one", "--1", "1e", "."] {
            assert_eq!(double(line.as_bytes()), Err(DecodeErrorKind::Double), "{line}");
        }
    }

    #[test]
    fn lengths_have_no_sign() {
        assert_eq!(length(b"0"), Some(Length::Of(0)));
        assert_eq!(length(b"?"), Some(Length::Streamed));
        assert_eq!(length(b"-1"), Some(Length::Null));
        assert_eq!(length(b"99999999999999999999999"), Some(Length::Of(u64::MAX)));
        for line in [&b""[..], b"+1", b"-0", b"-2", b"1x", b"??"] {
            assert_eq!(length(line), None);
        }
    }
}
