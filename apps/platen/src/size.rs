//! Numbers of bytes, as users type and read them.

use std::fmt;
use std::str::FromStr;

/// A number of bytes: `4096`, `512M`, `8G`. Units are powers of 1024.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Size(pub(crate) u64);

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("'{text}' is not a size: a number and perhaps K, M, G or T");
        let (number, shift) = match text.char_indices().next_back().ok_or_else(wrong)? {
            (at, 'K' | 'k') => (&text[..at], 10),
            (at, 'M' | 'm') => (&text[..at], 20),
            (at, 'G' | 'g') => (&text[..at], 30),
            (at, 'T' | 't') => (&text[..at], 40),
            _ => (text, 0),
        };
        if !number.starts_with(|first: char| first.is_ascii_digit()) {
            return Err(wrong());
        }
        let number: u64 = number.parse().map_err(|_| wrong())?;
        number.checked_mul(1 << shift).map(Self).ok_or_else(|| format!("'{text}' is too large"))
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut units = ["B", "K", "M", "G"].into_iter();
        #[expect(clippy::cast_precision_loss, reason = "shown with one digit")]
        let mut value = self.0 as f64;
        let mut unit = units.next().unwrap_or("B");
        for larger in units {
            if value < 1024.0 {
                break;
            }
            value /= 1024.0;
            unit = larger;
        }
        let digits = usize::from(value.fract() != 0.0);
        f.pad(&format!("{value:.digits$}{unit}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_numbers_with_a_unit() {
        let size = |text: &str| text.parse::<Size>().map(|size| size.0);
        assert_eq!(size("4096"), Ok(4096));
        assert_eq!(size("8G"), Ok(8 << 30));
        assert_eq!(size("512m"), Ok(512 << 20));
        assert_eq!(size("2T"), Ok(2 << 40));
        for bad in ["", "G", "-1G", "+1G", "1.5G", "8GB", "8 G", "0x10", "8é"] {
            assert!(size(bad).unwrap_err().contains("not a size"), "{bad}");
        }
        assert!(size("99999999999T").unwrap_err().contains("too large"));
    }

    #[test]
    fn sizes_are_shown_as_zramctl_shows_them() {
        for (bytes, shown) in
            [(0, "0B"), (4096, "4K"), (8 << 30, "8G"), (1536, "1.5K"), (5 << 40, "5120G")]
        {
            assert_eq!(Size(bytes).to_string(), shown);
        }
    }
}
