//! Scripts and functions. See also [`Script`](crate::Script).

use crate::command::{Command, ToArgument};
use crate::request::Request;

/// Returns whether the server has scripts with these digests, in the order of the digests.
pub fn script_exists(digests: impl IntoIterator<Item: ToArgument>) -> Request<Vec<bool>> {
    Command::new("SCRIPT").arg("EXISTS").args(digests).returning()
}

/// Removes all scripts from the server.
pub fn script_flush() -> Request<()> {
    Command::new("SCRIPT").arg("FLUSH").returning()
}

/// Ends the running script, unless it has written.
pub fn script_kill() -> Request<()> {
    Command::new("SCRIPT").arg("KILL").returning()
}

/// Loads a library of functions and returns its name.
pub fn function_load(library: impl ToArgument, replace: bool) -> Request<String> {
    Command::new("FUNCTION").arg("LOAD").flag("REPLACE", replace).arg(library).returning()
}

/// Deletes a library of functions.
pub fn function_delete(library: impl ToArgument) -> Request<()> {
    Command::new("FUNCTION").arg("DELETE").arg(library).returning()
}

/// Deletes all libraries of functions.
pub fn function_flush() -> Request<()> {
    Command::new("FUNCTION").arg("FLUSH").returning()
}

/// Calls a function.
pub fn fcall<T>(
    function: impl ToArgument,
    keys: impl IntoIterator<Item: ToArgument, IntoIter: ExactSizeIterator>,
    arguments: impl IntoIterator<Item: ToArgument>,
) -> Request<T> {
    Command::new("FCALL").arg(function).counted(keys).args(arguments).returning()
}

/// Calls a function that does not write, so that a replica can run it.
pub fn fcall_ro<T>(
    function: impl ToArgument,
    keys: impl IntoIterator<Item: ToArgument, IntoIter: ExactSizeIterator>,
    arguments: impl IntoIterator<Item: ToArgument>,
) -> Request<T> {
    Command::new("FCALL_RO").arg(function).counted(keys).args(arguments).returning()
}
