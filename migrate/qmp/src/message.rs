//! Messages that QEMU sends to a client: its greeting with its version, and replies.

use std::fmt;

use serde::Deserialize;
use serde_json::Value;

/// QEMU's version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
pub struct Version {
    /// 7 in 7.2.22.
    pub major: u32,
    /// 2 in 7.2.22.
    pub minor: u32,
    /// 22 in 7.2.22.
    pub micro: u32,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.micro)
    }
}

#[derive(Deserialize)]
pub(crate) struct Greeting {
    #[serde(rename = "QMP")]
    pub(crate) qmp: GreetingBody,
}

#[derive(Deserialize)]
pub(crate) struct GreetingBody {
    pub(crate) version: GreetingVersion,
}

#[derive(Deserialize)]
pub(crate) struct GreetingVersion {
    pub(crate) qemu: Version,
}

#[derive(Deserialize)]
pub(crate) struct Reply {
    #[serde(default)]
    pub(crate) id: Option<u64>,
    #[serde(default)]
    pub(crate) error: Option<ReplyError>,
    #[serde(skip)]
    pub(crate) value: Option<Value>,
}

#[derive(Deserialize)]
pub(crate) struct ReplyError {
    pub(crate) class: String,
    pub(crate) desc: String,
}
