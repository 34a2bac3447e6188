//! Parameters of a filter: `{{ root.name }}` and their values.

use serde_json::{Map, Value as Json};

use super::FilterError;

/// The values of parameters, grouped by the root of their names.
///
/// ```
/// use serde_json::json;
/// use tidewire_store::Filter;
/// use tidewire_store::query::Parameters;
///
/// let session = json!({"userId": "mara", "metadata": {"harbour": 3}});
/// let parameters = Parameters::new().with("session", session.as_object().unwrap());
/// let own = json!({"owner": "{{ session.userId }}", "harbour": "{{ session.metadata.harbour }}"});
/// let given = Filter::parse_with(&own, &parameters)?;
/// assert_eq!(given, Filter::parse(&json!({"owner": "mara", "harbour": 3}))?);
/// # Ok::<(), tidewire_store::query::FilterError>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct Parameters<'a> {
    roots: Vec<(&'a str, &'a Map<String, Json>)>,
}

impl<'a> Parameters<'a> {
    /// Creates a set without roots, with which braces are plain text.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a root and its values. A filter with a parameter that has no value is rejected. Null is a value, which equals a stored null.
    #[must_use]
    pub fn with(mut self, root: &'a str, values: &'a Map<String, Json>) -> Self {
        self.roots.push((root, values));
        self
    }
}

/// Parameters with the root `params`, as in a named query.
impl<'a> From<&'a Map<String, Json>> for Parameters<'a> {
    fn from(params: &'a Map<String, Json>) -> Self {
        Self::new().with("params", params)
    }
}

/// The parsed name of a parameter.
#[derive(Debug, Clone, Copy)]
pub(super) struct ParameterPath<'a> {
    whole: &'a str,
    root: &'a str,
    rest: &'a str,
}

impl<'a> ParameterPath<'a> {
    fn of(text: &'a str) -> Option<Self> {
        let whole = text.strip_prefix("{{")?.strip_suffix("}}")?.trim();
        let (root, rest) = whole.split_once('.')?;
        let is_root = !root.is_empty() && root.chars().all(|c| c.is_alphanumeric() || c == '_');
        let is_rest = !rest.is_empty() && !rest.contains(|c: char| c.is_whitespace() || c == '{' || c == '}');
        (is_root && is_rest).then_some(Self { whole, root, rest })
    }
}

/// The source of parameter values.
#[derive(Debug, Clone, Copy)]
pub(super) enum ParameterSource<'a> {
    Values(&'a Parameters<'a>),
    /// Only the roots are known; any value is accepted.
    Deferred(&'a [&'a str]),
}

impl<'a> ParameterSource<'a> {
    /// Parses a string as a parameter. Returns `None` if it is not a parameter or there are no roots.
    pub(super) fn path<'t>(&self, text: &'t str) -> Option<ParameterPath<'t>> {
        let has_any = match self {
            Self::Values(Parameters { roots }) => !roots.is_empty(),
            Self::Deferred(roots) => !roots.is_empty(),
        };
        if has_any { ParameterPath::of(text) } else { None }
    }

    /// Returns the value of a parameter. `None` if values are deferred.
    pub(super) fn value(&self, path: ParameterPath<'_>) -> Result<Option<&'a Json>, FilterError> {
        let name = || path.whole.to_owned();
        let unknown = |known: Vec<&str>| FilterError::UnknownParameter { name: name(), known: known.join(" or ") };
        match self {
            Self::Deferred(roots) if roots.contains(&path.root) => Ok(None),
            Self::Deferred(roots) => Err(unknown(roots.to_vec())),
            Self::Values(Parameters { roots }) => match roots.iter().find(|(root, _)| *root == path.root) {
                Some((_, values)) => {
                    find(values, path.rest).map(Some).ok_or_else(|| FilterError::MissingParameter { name: name() })
                }
                None => Err(unknown(roots.iter().map(|(root, _)| *root).collect())),
            },
        }
    }
}

/// Returns the member with this name, or at this path of names.
fn find<'a>(values: &'a Map<String, Json>, path: &str) -> Option<&'a Json> {
    values.get(path).or_else(|| {
        let (name, rest) = path.split_once('.')?;
        find(values.get(name)?.as_object()?, rest)
    })
}
