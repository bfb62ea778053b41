//! libqpl for a migration.

use crate::qat_args::{QplLibrary, SourceAccelerator};
use crate::say::say;
use anyhow::{bail, ensure};
use codec::Settings;
use qpl::{Loaded, Options, Path, Qpl};
use std::sync::Arc;

impl QplLibrary {
    /// Loads the library and opens it with the default options.
    pub(crate) fn open(&self) -> anyhow::Result<Qpl> {
        let loaded = Loaded::new(self.qpl_library.as_deref())?;
        Ok(Qpl::open(Arc::new(loaded), Options::default())?)
    }
}

/// Opens libqpl for a source, if codec qpl is wanted and the library is available. If that is not
/// an IAA device, reports on stderr what compresses.
pub(crate) fn for_source(
    wanted: SourceAccelerator,
    library: &QplLibrary,
    settings: Option<Settings>,
) -> anyhow::Result<Option<Qpl>> {
    if !settings.is_some_and(|settings| settings.is_qpl()) {
        let codec = settings.map_or("auto", |settings| settings.name());
        ensure!(
            wanted != SourceAccelerator::Iaa,
            "--accelerator iaa goes with --codec qpl, not with {codec}"
        );
        ensure!(
            library.qpl_library.is_none(),
            "--qpl-library goes with --codec qpl, not with {codec}"
        );
        return Ok(None);
    }
    match wanted {
        SourceAccelerator::None => Ok(None),
        SourceAccelerator::Iaa => {
            let qpl = library.open()?;
            match qpl.no_hardware() {
                None => Ok(Some(qpl.require())),
                Some(why) => bail!("--accelerator iaa: no IAA device for libqpl: {why}"),
            }
        }
        SourceAccelerator::Auto | SourceAccelerator::Qat => match library.open() {
            Ok(qpl) => {
                if qpl.path() == Path::Software {
                    let version = qpl.version();
                    let why = qpl.no_hardware().map_or(String::new(), |why| format!(": {why}"));
                    say(&format!("codec qpl by libqpl {version} in software{why}"));
                }
                Ok(Some(qpl))
            }
            Err(error) => {
                say(&format!("codec qpl by libdeflate: {error}"));
                Ok(None)
            }
        },
    }
}
