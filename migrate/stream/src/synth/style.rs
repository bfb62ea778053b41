//! The versions of QEMU that synthetic streams imitate.

/// The version of QEMU that a synthetic stream imitates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// QEMU 7.2: zero pages on main, a sync at the end of every section (EOS is the marker), SYNC
    /// may be set on packets with pages, and packets without pages have stale sizes, ids and
    /// offsets.
    Qemu72,
    /// QEMU 9.0: zero pages in packets, FLUSH markers, SYNC in separate packets, stale offsets.
    Qemu90,
    /// QEMU 9.2 and later: as 9.0, but no stale fields, and SYNC packets are zero except for three
    /// words.
    Qemu92,
}

impl Style {
    /// A machine type of that version.
    pub fn machine(self) -> &'static str {
        match self {
            Style::Qemu72 => "pc-q35-7.2",
            Style::Qemu90 => "pc-q35-9.0",
            Style::Qemu92 => "pc-q35-10.0",
        }
    }

    /// Whether the barrier marker is FLUSH (else every EOS).
    pub fn flushes(self) -> bool {
        self != Style::Qemu72
    }
}
