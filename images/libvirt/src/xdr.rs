//! The encoding of arguments and results (XDR, RFC 4506), as far as the calls need it.

use crate::LibvirtError;

/// The longest opaque value or text that an answer may have, bytes; libvirt's own limit.
const MAX_OPAQUE: usize = 4 << 20;
/// Kinds of typed parameters.
const STRING: u32 = 7;

/// The arguments of a call.
#[derive(Debug, Default)]
pub(crate) struct Arguments(Vec<u8>);

impl Arguments {
    pub(crate) fn number(mut self, number: u32) -> Self {
        self.0.extend(number.to_be_bytes());
        self
    }

    /// Appends bytes of a known length, which is a multiple of 4.
    pub(crate) fn fixed(mut self, bytes: &[u8; 16]) -> Self {
        self.0.extend(bytes);
        self
    }

    pub(crate) fn opaque(mut self, bytes: &[u8]) -> Self {
        // The daemon refuses longer values; the length of a domain's XML is checked before.
        let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        self = self.number(len);
        self.0.extend(bytes);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
        self
    }

    pub(crate) fn optional(self, text: Option<&str>) -> Self {
        match text {
            Some(text) => self.number(1).opaque(text.as_bytes()),
            None => self.number(0),
        }
    }

    /// Appends a list of typed parameters, all of them strings.
    pub(crate) fn parameters(self, all: &[(&str, &str)]) -> Self {
        let count = u32::try_from(all.len()).unwrap_or(u32::MAX);
        all.iter().fold(self.number(count), |arguments, (name, text)| {
            arguments.opaque(name.as_bytes()).number(STRING).opaque(text.as_bytes())
        })
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// The results of a call, from which values are taken in order.
#[derive(Debug)]
pub(crate) struct Results<'a>(pub(crate) &'a [u8]);

impl<'a> Results<'a> {
    pub(crate) fn number(&mut self) -> Result<u32, LibvirtError> {
        let (first, rest) = self.0.split_first_chunk::<4>().ok_or(SHORT)?;
        self.0 = rest;
        Ok(u32::from_be_bytes(*first))
    }

    pub(crate) fn signed(&mut self) -> Result<i32, LibvirtError> {
        Ok(i32::from_be_bytes(self.number()?.to_be_bytes()))
    }

    pub(crate) fn opaque(&mut self) -> Result<&'a [u8], LibvirtError> {
        let len = usize::try_from(self.number()?).unwrap_or(usize::MAX);
        if len > MAX_OPAQUE {
            return Err(LibvirtError::Answer("a value of more than 4 MiB"));
        }
        let bytes = self.0.get(..len).ok_or(SHORT)?;
        self.0 = self.0.get(len.next_multiple_of(4)..).ok_or(SHORT)?;
        Ok(bytes)
    }

    pub(crate) fn text(&mut self) -> Result<&'a str, LibvirtError> {
        std::str::from_utf8(self.opaque()?).map_err(|_| LibvirtError::Answer("a text not in UTF-8"))
    }

    pub(crate) fn optional(&mut self) -> Result<Option<&'a str>, LibvirtError> {
        match self.number()? {
            0 => Ok(None),
            1 => self.text().map(Some),
            _ => Err(LibvirtError::Answer("a value that is neither there nor absent")),
        }
    }
}

const SHORT: LibvirtError = LibvirtError::Answer("it ends before its values do");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let text = "a".repeat(5);
        let arguments = Arguments::default()
            .number(7)
            .opaque(b"xyz")
            .optional(None)
            .optional(Some(&text))
            .number(u32::MAX);
        assert_eq!(arguments.bytes().len(), 4 + 8 + 4 + 16 + 4);
        let mut results = Results(arguments.bytes());
        assert_eq!(results.number().unwrap(), 7);
        assert_eq!(results.opaque().unwrap(), b"xyz");
        assert_eq!(results.optional().unwrap(), None);
        assert_eq!(results.optional().unwrap(), Some(&text[..]));
        assert_eq!(results.signed().unwrap(), -1);
        assert!(results.number().is_err());
    }

    #[test]
    fn results_that_lie_about_their_length_are_errors() {
        for bytes in [&[][..], &[0, 0, 0], &[0, 0, 0, 5, 1, 2, 3, 4], &[0, 0, 0, 1, 1], &[255; 8]] {
            assert!(Results(bytes).opaque().is_err(), "{bytes:?}");
        }
        assert!(Results(&[0, 0, 0, 2, 0, 0, 0, 0]).optional().is_err());
        assert!(Results(&[0, 0, 0, 1, 0xff, 0, 0, 0]).text().is_err());
    }
}
