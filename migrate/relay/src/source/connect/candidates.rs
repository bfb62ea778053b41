//! The codecs and levels that a migration may use.

use crate::source::config::{SourceConfig, AUTO_HISTORY_LEVELS};
use codec::{Codec, Settings};

/// Codecs and levels that this migration may use.
pub(super) struct Candidates {
    pub(super) all: Vec<Settings>,
    /// The accelerator's codec and level, with `auto`.
    device: Option<Settings>,
    /// There is a choice.
    auto: bool,
}

impl Candidates {
    pub(super) fn new(config: &SourceConfig, accelerator: bool) -> Self {
        let device = Settings::new(Codec::DeflateQz, None).ok();
        let device = device.filter(|_| config.auto.is_some() && accelerator);
        let mut all = match &config.auto {
            Some(_) => controller::Config::candidates(),
            None => vec![config.settings],
        };
        all.extend(device);
        Self { all, device, auto: config.auto.is_some() }
    }

    /// The names, each once.
    pub(super) fn codecs(&self) -> Vec<String> {
        let mut names = Vec::new();
        for settings in &self.all {
            let name = settings.codec().name();
            if !names.iter().any(|known| known == name) {
                names.push(name.to_string());
            }
        }
        names
    }

    /// Removes the codecs that the peer does not decode.
    pub(super) fn keep_known(&mut self, known: &[String]) {
        self.all.retain(|settings| {
            settings.codec() == Codec::Raw
                || known.iter().any(|known| known == settings.codec().name())
        });
    }

    /// Takes histories where they pay. Level 6 with one sends fewer bytes than levels 7 and 9
    /// without, for about the CPU time of level 7.
    pub(super) fn use_histories(&mut self) {
        if !self.auto {
            for settings in &mut self.all {
                *settings = settings.with_history();
            }
            return;
        }
        let is_slow = |one: &Settings| one.codec() == Codec::Zstd && one.level() > 5;
        self.all.retain(|one| !is_slow(one));
        let zstd = AUTO_HISTORY_LEVELS.map(|level| Settings::new(Codec::Zstd, Some(level)));
        self.all.extend(zstd.into_iter().flatten().map(Settings::with_history));
    }

    /// The settings that the codec threads start with: with `auto` the accelerator's, or the first
    /// choice.
    pub(super) fn first(&self, config: &SourceConfig) -> Settings {
        match (&config.auto, self.device) {
            (None, _) => self.all.first().copied().unwrap_or(config.settings),
            (Some(_), Some(device)) if self.all.contains(&device) => device,
            (Some(_), _) => Settings::default(),
        }
    }
}
