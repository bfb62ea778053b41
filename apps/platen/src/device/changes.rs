//! Changes of a device's arguments by `platen device set`. The supervisor stores them and passes
//! them to every later server.

use super::codec_name::page_codec;
use crate::size::Size;
use codec::Codec;
use std::fmt;
use std::str::FromStr;

/// As text: `mem-limit=3221225472,codec=zstd,level=3`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Changes {
    pub(crate) size: Option<Size>,
    pub(crate) mem_limit: Option<Size>,
    pub(crate) codec: Option<Codec>,
    /// `Some(None)` is the codec's default level.
    pub(crate) level: Option<Option<i32>>,
}

impl Changes {
    /// Merges `later` into these changes. A new codec without a level gets its default level.
    pub(super) fn then(&self, later: &Self) -> Self {
        Self {
            size: later.size.or(self.size),
            mem_limit: later.mem_limit.or(self.mem_limit),
            codec: later.codec.or(self.codec),
            level: later.level.or(later.codec.map(|_| None)).or(self.level),
        }
    }
}

impl FromStr for Changes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut this = Self::default();
        for part in text.split(',').filter(|part| !part.is_empty()) {
            let wrong = || format!("'{part}' is not a setting that a device can change");
            let (name, value) = part.split_once('=').ok_or_else(wrong)?;
            match name {
                "size" => this.size = Some(value.parse()?),
                "mem-limit" => this.mem_limit = Some(value.parse()?),
                "codec" => this.codec = Some(page_codec(value)?),
                "level" if value == "default" => this.level = Some(None),
                "level" => this.level = Some(Some(value.parse().map_err(|_| wrong())?)),
                _ => return Err(wrong()),
            }
        }
        Ok(this)
    }
}

impl fmt::Display for Changes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Size(size) = self.size.unwrap_or(Size(0));
        let Size(limit) = self.mem_limit.unwrap_or(Size(0));
        let level = self.level.flatten();
        let level = level.map_or("default".to_owned(), |level| level.to_string());
        let parts = [
            self.size.map(|_| format!("size={size}")),
            self.mem_limit.map(|_| format!("mem-limit={limit}")),
            self.codec.map(|codec| format!("codec={}", codec.name())),
            self.level.map(|_| format!("level={level}")),
        ];
        f.write_str(&parts.into_iter().flatten().collect::<Vec<_>>().join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_are_read_back_and_later_changes_replace_earlier_ones() {
        for text in [
            "",
            "mem-limit=3221225472",
            "codec=qatzip,level=default",
            "size=4096,mem-limit=0,codec=zstd,level=-5",
            "codec=none",
        ] {
            assert_eq!(text.parse::<Changes>().unwrap().to_string(), text);
        }
        for bad in ["level=x", "codec=gzip", "mem-limit=", "more=1", "codec"] {
            assert!(bad.parse::<Changes>().is_err(), "{bad}");
        }
        let then = |former: &str, later: &str| {
            let [former, later] = [former, later].map(|text| text.parse::<Changes>().unwrap());
            former.then(&later).to_string()
        };
        assert_eq!(then("mem-limit=1,level=3", "codec=lz4"), "mem-limit=1,codec=lz4,level=default");
        assert_eq!(then("codec=zstd,level=3", "mem-limit=2"), "mem-limit=2,codec=zstd,level=3");
        assert_eq!(then("codec=lz4", "codec=zstd,level=9"), "codec=zstd,level=9");
    }
}
